"""Who decides: the policy and its past versions, search over forks, endpoints. Read `policy.py` first.

Scripted players, which need only a board, are in `entente/game/scripted.py`. This package knows no recorded forks, matches
or training.
"""
