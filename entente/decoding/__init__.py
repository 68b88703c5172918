"""Pure functions from legal orders to token tables, and from prompts to token ids. Read `legal_table.py` first."""
