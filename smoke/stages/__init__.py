"""The stages of a smoke test, one module each: `run(job)` returns what it found, or raises `StageFailed`."""
