"""Plain measuring programs, beside peers and beside an earlier training step. Read `trainer.py` first."""
