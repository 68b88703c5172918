"""Benchmarks against installed peers: TRL's training step, and XGrammar's mask."""
