"""Learning: the tiny model, advantages, the masked-policy loss, the step, checkpoints, and the process it all runs in."""
