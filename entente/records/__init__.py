"""Types that several packages share: policy versions, requests, completions, and the rows of a run. Read `rows.py` first."""
