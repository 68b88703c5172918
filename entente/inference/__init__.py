"""Engines that sample completions from the masked policy, and the mask over their logits. Read `engine.py` first: the
contract."""
