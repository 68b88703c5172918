"""How a run outlives its process: who works at it, what is to be done when that ended, and what Prefect is told of it."""
