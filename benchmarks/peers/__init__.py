"""Benchmarks against installed peers: TRL, XGrammar and llguidance.

Each module measures one comparison. `programs` holds what runs as a process of its own, some in an environment of its own.
"""
