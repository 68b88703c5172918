"""The game: rules, legal orders, prompts, scores and scripted players; the only room that touches
`diplomacy`."""
