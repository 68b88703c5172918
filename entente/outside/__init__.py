"""Players outside: OpenAI-compatible endpoints that order for a power."""
