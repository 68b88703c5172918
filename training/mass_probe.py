"""Which branching tokens are probed for their legal mass: the one figure that needs the whole head, so not all are.

    token c of a batch is probed  if  frac(c * golden ratio) < 1 / 8

The multiples of the golden ratio spread evenly (Weyl), so every stretch of a batch has its share; and the choice hangs on the
token's place in the batch alone, so that cutting an update otherwise probes the same tokens.
"""

import numpy as np

SHARE = 1 / 8
_GOLDEN = 0.6180339887498949


def probed(completion_index: np.ndarray) -> np.ndarray:
    """bool: which of these completion positions of a batch are probed."""
    return np.mod(np.asarray(completion_index, np.float64) * _GOLDEN, 1.0) < SHARE
