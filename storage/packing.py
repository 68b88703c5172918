"""The memory that batches are packed into: a few blocks, each used again once nobody holds an array that lies in it.

Promise: what was handed out is never written again while anything refers to it: the batch, one of its arrays, a slice of one, a
tensor made from it without a copy. So a batch may be read while the next one is packed, and nobody has to give anything back.
Fresh memory costs more than the copy into it, as the kernel hands it out page by page; used again, it costs nothing.
Never: know what is packed.
"""

import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

KEPT = 2
"""Blocks kept: one that is trained on, and one for the batch that is made ready meanwhile."""
_ALIGNED = 64
_SPARE = 1.25  # batches differ in size; the next one should fit
_UNHELD = 3  # references to a block that no array lies in: the list's, the variable's, the call's


class PackingBuffers:
    """Hands out arrays to be packed; any thread may ask."""

    def __init__(self) -> None:
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def arrays(self, wanted: Sequence[tuple[type[np.generic], int]]) -> list[npt.NDArray[Any]]:
        """One array of each (type, length), with whatever content; they lie in one block."""
        sizes = [length * np.dtype(kind).itemsize for kind, length in wanted]
        starts = np.cumsum([0, *(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]).tolist()
        with self._lock:
            block = self._block(starts[-1])
            return [
                block[start : start + size].view(kind) for start, size, (kind, _) in zip(starts[:-1], sizes, wanted, strict=True)
            ]

    def _block(self, size: int) -> npt.NDArray[np.uint8]:
        for place in range(len(self._blocks)):
            block = self._blocks[place]
            # an array, however it was cut from a block, refers to the block itself: numpy keeps no chains
            if sys.getrefcount(block) == _UNHELD:
                if len(block) < size:
                    block = self._blocks[place] = _fresh(size)
                return block
        block = _fresh(size)
        if len(self._blocks) < KEPT:
            self._blocks.append(block)
        return block


def _fresh(size: int) -> npt.NDArray[np.uint8]:
    return np.empty(max(_ALIGNED, int(size * _SPARE)), np.uint8)
