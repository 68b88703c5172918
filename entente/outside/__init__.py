"""Players outside: OpenAI-compatible endpoints that order for a power. Read `players.py` first."""
