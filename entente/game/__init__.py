"""Legal orders, prompts, scores and scripted players; only this package imports `diplomacy`. Read `board.py` first."""
