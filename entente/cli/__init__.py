"""The `entente` command: one small file per command, heavy imports only where a command runs. Read `train.py` first."""
