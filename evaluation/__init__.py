"""Playing strength: what a policy version, or a scripted player, is worth on positions it has not seen."""
