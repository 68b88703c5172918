"""Prefect flows: what runs, and when. Each file is a verb; everything they call works without Prefect."""
