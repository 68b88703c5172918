"""Deciders: the policy and its past versions, search over forks, endpoints. Read `policy.py` first.

Scripted players need only a board, and are in `entente/game/scripted.py`. Does not import recorded forks, matches or training."""
