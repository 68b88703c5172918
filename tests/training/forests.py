"""Random forests of tokens in depth-first order, as in `PackedMicroBatch`, made from parents instead of shared prefixes."""

from types import SimpleNamespace
from typing import Any

import numpy as np


def forest(tokens: int, *, splits: float = 0.02, seed: int = 0) -> Any:
    """A forest of `tokens` tokens: each continues the token before it, or with probability `splits` another token on its path, or
    begins a tree. It has the fields of a micro-batch that attention needs."""
    dice = np.random.default_rng(seed)
    parents, trail = np.full(tokens, -1), []
    for token in range(tokens):
        if dice.random() < splits:
            del trail[int((len(trail) + 1) * dice.random() ** 0.3) :]  # most often near the end, so that paths are long
        parents[token] = trail[-1] if trail else -1
        trail.append(token)
    leaves, positions = np.arange(1, tokens + 1), np.zeros(tokens, np.int64)
    for token in reversed(range(tokens)):
        if parents[token] >= 0:
            leaves[parents[token]] = max(leaves[parents[token]], leaves[token])
    for token in range(tokens):
        positions[token] = positions[parents[token]] + 1 if parents[token] >= 0 else 0
    follows = (parents[1:] == np.arange(tokens - 1)) & (leaves[1:] == leaves[:-1])
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    return SimpleNamespace(
        input_ids=np.zeros(tokens, np.int64),
        positions=positions,
        segment_starts=np.append(starts, tokens),
        segment_leaves=leaves[starts],
        leaves=leaves,
        parents=parents,
    )


def visible(made: Any, window: int | None = None) -> np.ndarray:
    """bool [tokens, tokens]: which tokens each token sees, by walking from parent to parent."""
    sees = np.zeros((len(made.parents),) * 2, bool)
    for token in range(len(made.parents)):
        above, steps = token, 0
        while above >= 0 and steps < (window or len(made.parents)):
            sees[token, above] = True
            above, steps = int(made.parents[above]), steps + 1
    return sees
