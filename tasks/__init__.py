"""Thin Prefect tasks: each names one piece of work, makes it visible and retryable, and calls plain functions for it.
Read `train_policy.py` first.

Tasks of a training step have no tags. Before a tagged task starts, Prefect asks its server about concurrency limits, so a busy
server would delay every step, and a lost one would stop the run. No task persists its result, so Prefect caches none.
"""
