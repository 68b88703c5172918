"""The pages of docs/ that are made from code; for developers only. Read `pages.py` first."""
