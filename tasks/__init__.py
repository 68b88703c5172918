"""Thin Prefect tasks: each makes one piece of work visible, named and retryable, and calls plain functions for it.

Tasks of a step bear no tags. Prefect asks its server about limits before it begins a task with a tag, so that every step would
wait for a server that is busy, and fail where it is gone.
"""
