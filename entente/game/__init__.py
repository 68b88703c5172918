"""The game: legal orders, prompts, scores and scripted players. Only this package imports `diplomacy`."""
