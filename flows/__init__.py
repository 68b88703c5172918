"""Prefect flows: what runs, and when; everything they call works without Prefect. Read `train_policy.py` first."""
