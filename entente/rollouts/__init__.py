"""Plays forks of frozen positions, makes the rows that training reads, and publishes them. Read `fork.py` first."""
