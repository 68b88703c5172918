"""Playing strength of policy versions and scripted players: held-out positions, matches and tactical positions."""
