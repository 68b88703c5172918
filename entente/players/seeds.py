"""Named seeds: a seed depends only on its name, not on the order of events."""

import hashlib
import random


def seed_of(*parts: object) -> int:
    """A 63-bit seed from the names in `parts`, stable across processes and versions."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seeded_rng(*parts: object) -> random.Random:
    return random.Random(seed_of(*parts))
