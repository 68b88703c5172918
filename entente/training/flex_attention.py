"""Packed attention by torch's flex_attention: one call per layer, without gathered keys and without masks in memory.

It computes the blocks of queries and keys of which any see each other: 1.6 times the visible pairs in micro-batches of 4,096
tokens, where the ranges of a GPU have 2.6 (counted). For a GPU alone, because torch has no gradient of it on a CPU. Unmeasured on
a card; `entente smoke` compares it with the ranges there.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from entente.training.micro_batches import MicroBatch
from entente.training.packed_attention import to_device

_BLOCK = 128
"""Tokens of a block: torch's default."""


class FlexAttention:
    """A `PackedAttention`, in the last layer too: only for the tokens that are read it would need another kernel."""

    def __init__(self, micro: MicroBatch, device: torch.device) -> None:
        self._device, self._tokens, self._deepest = device, micro.tokens, int(micro.positions.max())
        self._leaves, self._positions = (to_device(each.astype(np.int32), device) for each in (micro.leaves, micro.positions))
        self._seen, self._whole = _blocks(micro)
        self._masks: dict[int | None, BlockMask] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        mask, shares = self.block_mask(window), query.shape[1] != key.shape[1]
        return _kernel(self._device.type)(query, key, value, block_mask=mask, scale=scale, enable_gqa=shares).transpose(1, 2)

    def block_mask(self, window: int | None = None) -> BlockMask:
        window = None if window is None or window > self._deepest else window
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> BlockMask:
        """As torch's `create_block_mask`, which asks for each pair of tokens. Blocks outside every window are computed too."""
        whole = self._whole if window is None else np.zeros_like(self._whole)
        partial = self._seen & ~whole
        lists = [each for seen in (partial, whole, partial.T, whole.T) for each in _lists(seen)]
        on_device = [to_device(each, self._device)[None, None] for each in lists]
        return BlockMask((self._tokens, self._tokens), *on_device, BLOCK_SIZE=(_BLOCK, _BLOCK), mask_mod=self._rule(window))

    def _rule(self, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        leaves, positions = self._leaves, self._positions

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < leaves[key])

        if window is None:
            return sees

        def sees_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return sees(batch, head, query, key) & (positions[query] - positions[key] < window)

        return sees_near


def _blocks(micro: MicroBatch) -> tuple[np.ndarray, np.ndarray]:
    """bool [blocks of queries, blocks of keys]: any query sees any key; every query sees every key.

    The queries that see a key begin with the key itself, so each block of keys is seen from itself on to its last descendant."""
    starts = np.arange(0, micro.tokens, _BLOCK)
    last, first = (reduce.reduceat(micro.leaves, starts) for reduce in (np.maximum, np.minimum))
    query, key = np.arange(len(starts))[:, None], np.arange(len(starts))[None, :]
    seen = (key <= query) & (starts[:, None] < last)
    return seen, (key < query) & (starts[:, None] + _BLOCK <= first)


def _lists(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int32 [rows]: how many blocks each row sees; int32 [rows, blocks]: these first, then the others."""
    return seen.sum(1, dtype=np.int32), np.argsort(~seen, axis=1, kind="stable").astype(np.int32)


@cache
def _kernel(device: str) -> Callable[..., Tensor]:
    """Compiled for any length. On a CPU, for tests, not compiled: torch then computes every pair, by the same rule.

    With `fullgraph` torch raises an error where it would otherwise compute every pair on a card too, without a word."""
    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True, fullgraph=True)
