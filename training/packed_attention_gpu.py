"""Packed attention on CUDA: one variable-length flash call, or torch's flex attention with a block-sparse tree mask.

Varlen treats each segment as a sequence. Its keys are the ancestors of the segment and then its own tokens. Flash attention
supports neither float32 nor, here, sliding windows.
Flex uses the rule k <= q < leave[k] as its mask function and skips blocks in which no token sees another. It is compiled once per
length, so lengths are rounded up to a few values. Only the attention computes this padding.

Neither was ever run on a GPU. Tests on a CPU cover everything but the kernels: index arithmetic, gradients around the variable-
length call, the block mask, and the forward of flex attention, which has no backward there.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.tree_blocks import tree_blocks
from training.trie_plan import PackedMicroBatch

_SMALLEST = 1024
_BLOCK = 128
"""Tokens of a block of flex attention's mask: torch's default. Every padded length is a multiple of it."""


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
        self._tokens, self._device = len(micro.input_ids), device
        self._length = padded_length(self._tokens)
        # A padding token sees only itself, so that no softmax is empty.
        self._leaves = np.arange(1, self._length + 1, dtype=np.int32)
        self._leaves[: self._tokens] = micro.leaves
        self._positions = np.zeros(self._length, np.int32)
        self._positions[: self._tokens] = micro.positions
        self._masks: dict[int | None, Any] = {}

    def mask(self, window: int | None) -> Any:
        """The `BlockMask` of layers with this window.

        It is what torch's `create_block_mask` returns. That function evaluates the rule for all pairs of tokens: with 32,768
        tokens, each of its arrays of booleans has 1 GiB.
        """
        window = None if window is None or window > self._positions.max() else window
        if window in self._masks:
            return self._masks[window]
        from torch.nn.attention.flex_attention import BlockMask

        leaves, positions = (torch.from_numpy(values).to(self._device) for values in (self._leaves, self._positions))
        reach = window or 0

        def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= q) & (q < leaves[k])

        def sees_near(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return sees(batch, head, q, k) & (positions[q] < positions[k] + reach)

        partial, full = tree_blocks(self._leaves, self._positions, window, _BLOCK)
        made = BlockMask.from_kv_blocks(
            *_columns(partial, self._device),
            *_columns(full, self._device),
            BLOCK_SIZE=_BLOCK,
            mask_mod=sees if window is None else sees_near,
            seq_lengths=(self._length, self._length),
        )
        self._masks[window] = made
        return made

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        """As `PackedAttention`."""
        short = self._length - self._tokens
        query, key, value = (torch.nn.functional.pad(values, (0, 0, 0, short)) for values in (query, key, value))
        # All three tensors already have the model's dtype; autocast must not change it.
        with torch.autocast(query.device.type, enabled=False):
            attended = _compiled(query.device.type)(
                query, key, value, block_mask=self.mask(window), scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )
        return attended[:, :, : self._tokens].transpose(1, 2)


def _columns(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of bool [n, n] as torch wants them: int32 [1, 1, n] how many columns are set, and [1, 1, n, n] these columns first."""
    counts, order = blocks.sum(1, dtype=np.int32), np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(order)[None, None].to(device)


def flash(*arguments: Any, **named: Any) -> Tensor:
    """torch's `varlen_attn`."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(*arguments, **named)  # type: ignore[return-value]  # a pair only if more is asked for


class VarlenAttention:
    """Variable-length flash attention: one call for all segments.

    Attributes:
        keys: int64 [keys of all segments], tokens.
    """

    def __init__(self, micro: PackedMicroBatch, device: torch.device) -> None:
        starts, depths = micro.segment_starts, micro.positions[micro.segment_starts[:-1]]
        lengths = np.diff(starts)
        self.keys = torch.from_numpy(_keys_of_segments(micro, depths + lengths)).to(device)
        self._query_ends = torch.from_numpy(starts.astype(np.int32)).to(device)
        self._key_ends = torch.from_numpy(np.concatenate([[0], np.cumsum(depths + lengths)]).astype(np.int32)).to(device)
        self._most = int(lengths.max()), int((depths + lengths).max())

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        """As `PackedAttention`; without sliding windows.

        Raises:
            NotImplementedError: a token of this micro-batch is deeper than `window`.
        """
        if window is not None and window < self._most[1]:
            raise NotImplementedError("variable-length attention has no sliding window here")
        query, key, value = (values.transpose(1, 2)[0].contiguous() for values in (query, key, value))
        attended: Any = _Segments.apply(query, key, value, self, scale)
        return attended[None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention [T, heads, width] of queries over gathered keys and values [keys of all segments, key heads, width]."""
        # The window (-1, 0) is causal, aligned at the end: the last token of a segment sees all its keys.
        return flash(
            query,
            key,
            value,
            self._query_ends,
            self._key_ends,
            *self._most,
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )


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


class _Segments(torch.autograd.Function):
    """Gathers keys and values and attends. The backward computes both again, so nothing that is gathered is kept: a prompt's keys
    are gathered once per segment below it."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: VarlenAttention, scale: float
    ) -> Tensor:
        """Attend.

        Args:
            query: [T, heads, width].
            key, value: [T, key heads, width].

        Returns:
            [T, heads, width].
        """
        ctx.save_for_backward(query, key, value)
        ctx.call, ctx.scale = call, scale
        return call.attend(query, key.index_select(0, call.keys), value.index_select(0, call.keys), scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """Gradients of query, key and value. Those of keys are summed in float32, because there are many for a prompt's."""
        query, key, value = ctx.saved_tensors
        keys = ctx.call.keys
        given = [rows.detach().requires_grad_() for rows in (query, key.index_select(0, keys), value.index_select(0, keys))]
        with torch.enable_grad():
            attended = ctx.call.attend(*given, ctx.scale)
        of_query, *of_gathered = torch.autograd.grad(attended, given, gradient.contiguous())
        width = torch.promote_types(key.dtype, torch.float32)
        sums = [
            torch.zeros(key.shape, dtype=width, device=key.device).index_add_(0, keys, each.to(width)) for each in of_gathered
        ]
        return of_query, *(each.to(key.dtype) for each in sums), None, None
