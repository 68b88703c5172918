"""Training: the tiny model, advantages, the masked-policy loss, the step, checkpoints, and the trainer process."""
