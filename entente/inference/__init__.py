"""Engines that draw completions from the masked policy, and the legal orders as a mask over their logits."""
