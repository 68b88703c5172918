"""Frozen mid-game positions: built offline, stored immutably, drawn as the starts of rollouts."""
