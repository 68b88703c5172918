"""Legal orders to token tables, and prompts to token ids. Pure functions for every package that needs tokens."""
