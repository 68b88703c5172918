"""The game: legal orders, prompts, scores, scripted players; the only room that touches `diplomacy`."""
