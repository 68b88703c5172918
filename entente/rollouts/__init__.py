"""Plays forks of frozen positions and publishes the rows that training reads. Read `fork.py` first."""
