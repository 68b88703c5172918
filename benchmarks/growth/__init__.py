"""Benchmarks of growth: the same cost at several sizes, and its exponent. Each module measures one kind of size."""
