"""Legal orders to token tables, and prompts to token ids, as pure functions. Read `legal_table.py` first."""
