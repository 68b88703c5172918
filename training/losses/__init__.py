"""Policy losses, one file each. `choose.py` maps names to losses; docs/training.md has the formulas."""
