"""A base model that imitates a teacher's games. Read `imitate.py` first."""
