"""Used by every package: the error tree, metric names and their sinks, timing, devices. Read `errors.py` first."""
