"""Rows, ledgers and adapters of a run as immutable files, and an in-memory DuckDB index over them. Read `shards.py` first."""
