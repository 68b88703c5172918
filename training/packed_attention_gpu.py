"""Packed attention on CUDA: torch's flex attention with a block-sparse tree mask, or one variable-length flash call.

Flex uses the rule k <= q < leave[k] as its mask function and skips blocks in which no token sees another. It is compiled once per
length, so lengths are rounded up to a few values. Only the attention computes this padding.
Varlen treats each segment as a sequence. Its keys are the ancestors of the segment and then its own tokens. Flash attention does
not support float32.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.trie_plan import PackedMicroBatch

_SMALLEST = 1024


def padded_length(tokens: int) -> int:
    """The length that flex attention is compiled for: a power of two or 1.5 times one, at least 1,024."""
    power = 1 << max(tokens - 1, _SMALLEST - 1).bit_length()
    return power * 3 // 4 if power > _SMALLEST and tokens <= power * 3 // 4 else power


@cache
def _compiled(device: str) -> Any:
    """Flex attention; compiled on CUDA, uncompiled elsewhere (forward only, for tests of the mask)."""
    from torch.nn.attention.flex_attention import flex_attention

    # There is one graph per length, at most about twenty. Beyond torch's limit it would fall back to the uncompiled form with its
    # T x T scores.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention


class FlexAttention:
    """Flex attention over the forest."""

    def __init__(self, micro: PackedMicroBatch, device: torch.device) -> None:
        self._tokens = len(micro.input_ids)
        self._length = padded_length(self._tokens)
        # A padding token sees only itself, so that no softmax is empty.
        padded = np.arange(1, self._length + 1)
        padded[: self._tokens] = micro.leaves
        self._leaves = torch.from_numpy(padded.astype(np.int32)).to(device)
        positions = np.zeros(self._length, np.int32)
        positions[: self._tokens] = micro.positions
        self._positions, self._deepest = torch.from_numpy(positions).to(device), int(positions.max())
        self._masks: dict[int | None, Any] = {}

    def _mask(self, window: int | None) -> Any:
        """The block mask of layers with this window."""
        window = None if window is None or window > self._deepest else window
        if window in self._masks:
            return self._masks[window]
        from torch.nn.attention.flex_attention import create_block_mask

        leaves, positions, reach = self._leaves, self._positions, window or 0

        def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < leaves[k])

        def sees_near(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return sees(batch, head, q, k) & (positions[q] < positions[k] + reach)

        rule = sees if window is None else sees_near
        made = create_block_mask(rule, None, None, self._length, self._length, device=str(leaves.device))
        self._masks[window] = made
        return made

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        """As `PackedAttention`."""
        short = self._length - self._tokens
        query, key, value = (torch.nn.functional.pad(values, (0, 0, 0, short)) for values in (query, key, value))
        # All three tensors already have the model's dtype; autocast must not change it.
        with torch.autocast(query.device.type, enabled=False):
            attended = _compiled(query.device.type)(
                query, key, value, block_mask=self._mask(window), scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )
        return attended[:, :, : self._tokens].transpose(1, 2)


class VarlenAttention:
    """Variable-length flash attention: one call for all segments."""

    def __init__(self, micro: PackedMicroBatch, device: torch.device) -> None:
        starts, depths = micro.segment_starts, micro.positions[micro.segment_starts[:-1]]
        lengths = np.diff(starts)
        keys = _keys_of_segments(micro, depths + lengths)
        self._keys = torch.from_numpy(keys).to(device)
        self._query_ends = torch.from_numpy(starts.astype(np.int32)).to(device)
        self._key_ends = torch.from_numpy(np.concatenate([[0], np.cumsum(depths + lengths)]).astype(np.int32)).to(device)
        self._most = int(lengths.max()), int((depths + lengths).max())

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        """As `PackedAttention`; without sliding windows."""
        if window is not None:
            raise NotImplementedError("variable-length attention has no sliding window here")
        key, value = (_Gather.apply(values.transpose(1, 2)[0], self._keys) for values in (key, value))
        attended, *_ = torch.ops.aten._flash_attention_forward(
            query.transpose(1, 2)[0].contiguous(),
            key,
            value,
            self._query_ends,
            self._key_ends,
            *self._most,
            0.0,
            True,  # causal, aligned at the end: the last token of a segment sees all its keys
            False,
            scale=scale,
        )
        return attended[None]


def _keys_of_segments(micro: PackedMicroBatch, key_counts: np.ndarray) -> np.ndarray:
    """Keys of all segments, concatenated: each segment's ancestors, then its tokens. `trail` is the path from the root."""
    trail = np.empty(int(key_counts.max()), np.int64)
    keys = np.empty(int(key_counts.sum()), np.int64)
    at = 0
    bounds = zip(micro.segment_starts[:-1].tolist(), micro.segment_starts[1:].tolist(), key_counts.tolist(), strict=True)
    for low, high, count in bounds:
        trail[count - (high - low) : count] = np.arange(low, high)
        keys[at : at + count] = trail[:count]
        at += count
    return keys


class _Gather(torch.autograd.Function):
    """Gathers rows by index. Gradients are summed in float32, because a prompt's keys are gathered once per completion."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
        """rows[index]."""
        ctx.save_for_backward(index)
        ctx.rows = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """Sum by index."""
        (index,) = ctx.saved_tensors
        whole = torch.zeros((ctx.rows, *gradient.shape[1:]), dtype=torch.float32, device=gradient.device)
        return whole.index_add_(0, index, gradient.float()).to(gradient.dtype), None
