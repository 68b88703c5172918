"""The report, the replay and comparisons of runs, made from the runs' files alone. Read `page.py` first."""
