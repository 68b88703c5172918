"""Trajectories, batches and adapters as immutable files, and an in-memory DuckDB lens over them."""
