"""Deciders: the policy and its past versions, search over forks, endpoints. Read `policy.py` first.

Scripted players, which need only a board, are in `entente/game/scripted.py`. This package does not import recorded forks,
matches or training.
"""
