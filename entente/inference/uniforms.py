"""The random numbers of all draws: a function of a request's seed and of the token's place in its completion.

Nothing is stored between draws, so a draw does not depend on the batch, on a jump over forced tokens, on a request that is
repeated after a failure, or on the engine. The numbers are made on the host in integers; a device gets them finished.

The n-th number of a seed is the n-th output of splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", 2014), which can be computed without those before it:

    z = seed + (n + 1) * 0x9E3779B97F4A7C15;  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;  z = (z ^ z >> 27) * 0x94D049BB133111EB;
    z ^ z >> 31        (all modulo 2**64)

Its upper 53 bits are the number. Seeds are hashes (`entente/players/seeds.py`), so the sequences of two requests do not overlap.
"""

from collections.abc import Sequence

import numpy as np

_STEP, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BITS = 2**64 - 1


def seed_array(seeds: Sequence[int]) -> np.ndarray:
    """The seeds modulo 2**64, uint64 [n]."""
    return np.fromiter((seed & _BITS for seed in seeds), np.uint64, len(seeds))


def uniforms(seeds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each seed.

    Args:
        seeds: uint64 [n].
        places: int64 [n] number of the completion's tokens before the one that is drawn.

    Returns:
        float64 [n], multiples of 2**-53.
    """
    mixed = seeds + (places.astype(np.uint64) + np.uint64(1)) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
