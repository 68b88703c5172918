"""Thin Prefect tasks: each makes one piece of work visible, named and retryable, and calls plain functions for it."""
