"""Thin Prefect tasks: each makes one piece of work visible and retryable. Read `train_policy.py` first.

Tasks of a training step have no tags: before a tagged task Prefect asks its server about concurrency limits, so a busy server
would delay every step, and a lost one would stop the run. No task persists its result, so Prefect caches none.
"""
