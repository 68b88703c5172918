"""Inference over HTTP: the worker that serves an engine, and the pool of workers that a run asks."""
