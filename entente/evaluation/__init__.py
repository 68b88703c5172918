"""Playing strength of policy versions and scripted players: held-out positions and matches. Read `strength.py` first."""
