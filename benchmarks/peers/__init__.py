"""Benchmark against TRL's training step. Read `bench.py` first."""
