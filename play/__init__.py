"""A board in the browser: games that people, policy versions and scripted players play together."""
