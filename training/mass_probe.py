"""Selects the branching tokens whose legal mass is computed. Legal mass needs the logits of the whole vocabulary, so only an
eighth of the tokens is probed.

    token c of a batch is probed  if  frac(c * golden ratio) < 1 / 8

Multiples of the golden ratio are spread evenly (Weyl), so every part of a batch is sampled. The choice depends only on the
token's place in the batch, so it does not depend on how an update is split into micro-batches.
"""

import numpy as np

SHARE = 1 / 8
_GOLDEN = 0.6180339887498949


def probed(completion_index: np.ndarray) -> np.ndarray:
    """bool [positions]: which of these completion positions of a batch are probed."""
    return np.mod(np.asarray(completion_index, np.float64) * _GOLDEN, 1.0) < SHARE
