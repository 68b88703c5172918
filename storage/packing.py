"""The memory of batches: a few blocks, each reused when nothing refers to it any more.

A block is not written while anything refers to it: the batch, an array, a slice, or a tensor that shares its memory. So a batch
can be read while the next one is packed, and nobody has to return memory. Reuse saves time: the kernel provides fresh memory
page by page, which costs more than the copy into it.
"""

import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

KEPT = 2
"""Blocks that are kept: one for the batch in training, one for the next."""
_ALIGNED = 64
_SPARE = 1.25  # batches differ in size, and the next one should fit
_REFERENCES_IF_FREE = 3  # the list, the variable, and the argument of getrefcount


class PackingBuffers:
    """Provides arrays for batches; any thread may call it."""

    def __init__(self) -> None:
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def arrays(self, wanted: Sequence[tuple[type[np.generic], int]]) -> list[npt.NDArray[Any]]:
        """One uninitialised array per (type, length); all of them lie in one block."""
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
            # The base of every view, and of a view of a view, is the block itself.
            if sys.getrefcount(block) == _REFERENCES_IF_FREE:
                if len(block) < size:
                    block = self._blocks[place] = _fresh(size)
                return block
        block = _fresh(size)
        if len(self._blocks) < KEPT:
            self._blocks.append(block)
        return block


def _fresh(size: int) -> npt.NDArray[np.uint8]:
    return np.empty(max(_ALIGNED, int(size * _SPARE)), np.uint8)
