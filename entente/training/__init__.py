"""The trainer: batches, the masked-policy loss, the step, checkpoints, and its process. Read `trainer.py` first."""
