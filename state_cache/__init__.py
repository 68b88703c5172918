"""Frozen mid-game positions: built offline, stored immutably, sampled as starts of rollouts. Read `sampling.py` first."""
