"""Benchmark against an installed peer: TRL's training step."""
