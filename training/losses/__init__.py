"""Policy losses, one file each, behind the one hook in `choose.py`; docs/training.md has the formulas."""
