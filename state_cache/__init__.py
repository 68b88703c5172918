"""The state cache: frozen mid-game positions, built offline, stored immutably, sampled as start positions of rollouts."""
