"""Benchmark against an installed peer: TRL's training step and its whole trainer. Read `bench.py` first."""
