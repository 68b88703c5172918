"""Samples tokens from logits over legal sets, with numpy alone.

log pi(a) = z_a / T - log sum_{b legal} exp(z_b / T)        (the masked policy; z: logits, T: temperature of the request)

A thought token is sampled from an open set, which no array lists.

The random number of a token is a function of the request's seed and of the token's place in the completion. There is no state
between tokens, so a sample does not depend on the batch, on skipped forced tokens, on a retry, or on the engine: vLLM's processor
uses the same numbers (`LegalArena.sample`). The host computes them in integers. The n-th number of a seed is the n-th output of
splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014):

    z = seed + (n + 1) * 0x9E3779B97F4A7C15;  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;  z = (z ^ z >> 27) * 0x94D049BB133111EB;
    z ^ z >> 31        (all modulo 2**64)

Its upper 53 bits are the number. Seeds are hashes (`entente/players/seeds.py`), so the sequences of two requests do not overlap.
"""

from collections.abc import Sequence

import numpy as np

from entente.decoding.open_set import nth_id, set_size

_STEP, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_BITS = 2**64 - 1


def sample(
    allowed: Sequence[np.ndarray], logits: np.ndarray, temperatures: Sequence[float], seeds: np.ndarray, places: np.ndarray
) -> tuple[list[int], list[float], np.ndarray]:
    """Sample one token from each legal set.

    Args:
        allowed: legal set of each completion, int32: n_i tokens, or an open set of n_i tokens.
        logits: float32 [sum of n_i], in the order of `allowed`; those of an open set in the order of its ids.
        temperatures: above 0, one for each completion.

    Returns:
        tokens; log-probabilities, nats; bool [completions], False where a logit is NaN or plus infinity (invalid token).
    """
    counts = np.fromiter((set_size(legal) for legal in allowed), np.int64, len(allowed))
    ends = np.cumsum(counts)
    starts = ends - counts
    values = logits.astype(np.float64)
    largest = np.maximum.reduceat(values, starts)
    finite = np.isfinite(largest)
    values[~np.repeat(finite, counts)] = largest[~finite] = 0.0
    # The largest is subtracted first: a large logit divided by a small temperature could overflow.
    scaled = values - np.repeat(largest, counts)
    with np.errstate(over="ignore"):
        scaled /= np.repeat(temperatures, counts)
    weights = np.exp(scaled)
    totals = np.add.reduceat(weights, starts)
    reached = np.cumsum(weights)
    chosen = np.searchsorted(reached, reached[ends - 1] - totals * (1.0 - uniforms(seeds, places)), side="right")
    chosen = np.clip(chosen, starts, ends - 1)
    tokens = [nth_id(legal, place) for legal, place in zip(allowed, (chosen - starts).tolist(), strict=True)]
    return tokens, (scaled[chosen] - np.log(totals)).tolist(), finite


def seed_array(seeds: Sequence[int]) -> np.ndarray:
    """The seeds modulo 2**64, uint64 [n]."""
    return np.fromiter((seed & _BITS for seed in seeds), np.uint64, len(seeds))


def uniforms(seeds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """float64 [n] in [0, 1), multiples of 2**-53; `seeds` uint64 [n]; `places` int64 [n]: completion tokens so far."""
    mixed = seeds + (places.astype(np.uint64) + np.uint64(1)) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
