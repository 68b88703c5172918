"""From legal orders to token tables, and from prompts to ids: pure, shared by every room that needs tokens."""
