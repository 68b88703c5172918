"""Types that several rooms share: policy versions, requests, completions, and the rows of a run. Read `rows.py` first."""
