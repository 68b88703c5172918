"""Benchmarks, some of them against TRL and against an earlier training step. Read `trainer.py` first."""
