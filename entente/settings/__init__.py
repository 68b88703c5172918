"""The settings of a run as one tree, checked across packages, and the model that they name. Read `run_settings.py` first."""
