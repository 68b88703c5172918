"""Live pages of runs (`entente view`). Read `server.py` first."""
