"""Attention over a forest of token paths in depth-first order: each token sees the tokens above it and itself.

In that order (`trie_plan`), token q sees token k exactly if k <= q < leave[k]. So any range of tokens sees nothing before it but
the ancestors of its first token. On a CPU the forest is cut into such ranges, each one call of torch's fused attention over
gathered keys; where to cut is what costs least. `DenseAttention` writes the rule out as a mask: slow, plain, everywhere.

The functions enter transformers through its attention registry, so that its models and peft's layers stay untouched.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from training.trie_plan import PackedMicroBatch

_NAME = "entente_packed"
_CHUNK = 128
"""Tokens between the places where a long segment may be cut: its later parts need not be masked against by the earlier ones."""
_LONGEST_RANGE = 1024
_KEY_COST = 4
_CALL_COST = 2000
"""Of gathering one key, and of one call, against one query-key pair; measured, tiny models, one CPU thread."""


class PackedAttention(Protocol):
    """Attention over one packed micro-batch, the same for all layers."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend.

        Args:
            query: [1, heads, T, width].
            key, value: [1, key heads, T, width]; heads is a multiple of key heads.

        Returns:
            [1, T, heads, width].
        """
        ...


@torch.compiler.disable  # where blocks are compiled: kernels of its own, and another object for each micro-batch
def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, Any]:
    """What transformers calls in each layer: the micro-batch's attention, if the model was given one, else its usual one."""
    packed: PackedAttention | None = given.pop("packed_attention", None)
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    return packed(query, key, value, given["scaling"]), None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def take_over_attention(config: Any) -> None:
    """Have the model of `config` call `_attend`: for good, since layers that are computed again on the way back must attend as
    they did on the way there, and compiled ones are compiled for one name."""
    config._attn_implementation = _NAME


def attend_packed(config: Any, attention: PackedAttention, device: torch.device) -> dict[str, Any]:
    """Arguments that have the model of `config` attend so. Its other forwards stay what they are."""
    take_over_attention(config)
    # A mask of four dimensions is handed on as it is, so transformers makes none; one of two would have packed decisions see
    # each other, and none at all has it look for packing of its own.
    return {"packed_attention": attention, "attention_mask": torch.empty((1, 1, 1, 0), device=device)}


class DenseAttention:
    """One call under a T x T mask."""

    def __init__(self, micro: PackedMicroBatch, device: torch.device) -> None:
        leaves = torch.from_numpy(micro.leaves).to(device)
        place = torch.arange(len(leaves), device=device)
        self._sees = (place[None, :] <= place[:, None]) & (place[:, None] < leaves[None, :])

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """As `PackedAttention`."""
        # Repeated, since the fused kernels know a mask or shared keys but not both.
        key, value = (values.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for values in (key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=self._sees, scale=scale)
        return attended.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Range:
    """Tokens that attend in one call."""

    begin: int
    end: int
    above: tuple[tuple[int, int], ...]
    """Runs of tokens before `begin` that the first token sees."""
    sees: np.ndarray
    """bool [end - begin, keys]: the runs above, then the range itself."""


class RangeAttention:
    """Range after range, through torch's fused CPU attention; the heads that share a key stand below one another."""

    def __init__(self, micro: PackedMicroBatch) -> None:
        self._ranges = _ranges(micro)
        self._masks: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """As `PackedAttention`."""
        shared_by = query.shape[1] // key.shape[1]
        masks = self._masks.get((shared_by, query.dtype))
        if masks is None:
            masks = self._masks[shared_by, query.dtype] = [_additive(part.sees, shared_by, query.dtype) for part in self._ranges]
        attended: Any = _Ranges.apply(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), self._ranges, masks, scale
        )
        return attended


def _additive(sees: np.ndarray, shared_by: int, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~torch.from_numpy(sees), float("-inf"))
    return mask.repeat(shared_by, 1)


class _Ranges(torch.autograd.Function):
    """Forward and backward over the ranges; gradients of keys and values are added where they were gathered from."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: list[_Range], masks: list[Tensor], scale: float
    ) -> Tensor:
        """All of [1, T, heads, width]."""
        attended, sums = torch.empty_like(query), []
        heads = key.shape[2]
        for part, mask in zip(parts, masks, strict=True):
            found, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _below(query, part, heads), _gathered(key, part), _gathered(value, part), attn_mask=mask, scale=scale
            )
            _beside(attended, part, found)
            sums.append(logsumexp)
        ctx.save_for_backward(query, key, value, attended, *sums)
        ctx.parts, ctx.masks, ctx.scale = parts, masks, scale
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """The same ranges once more."""
        query, key, value, attended, *sums = ctx.saved_tensors
        of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        heads = key.shape[2]
        for part, mask, logsumexp in zip(ctx.parts, ctx.masks, sums, strict=True):
            by_query, by_key, by_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _below(gradient, part, heads),
                _below(query, part, heads),
                _gathered(key, part),
                _gathered(value, part),
                _below(attended, part, heads),
                logsumexp,
                0.0,
                False,
                attn_mask=mask,
                scale=ctx.scale,
            )
            _beside(of_query, part, by_query)
            _spread(of_key, part, by_key)
            _spread(of_value, part, by_value)
        return of_query, of_key, of_value, None, None, None


def _below(values: Tensor, part: _Range, key_heads: int) -> Tensor:
    """[1, T, heads, width] -> [1, key heads, (heads / key heads) * tokens of the range, width]."""
    rows = values[0, part.begin : part.end].unflatten(1, (key_heads, -1))
    return rows.permute(1, 2, 0, 3).flatten(1, 2)[None]


def _beside(whole: Tensor, part: _Range, rows: Tensor) -> None:
    """The way back of `_below`, written into the range's place."""
    tokens = part.end - part.begin
    whole[0, part.begin : part.end].unflatten(1, (rows.shape[1], -1)).copy_(
        rows[0].unflatten(1, (-1, tokens)).permute(2, 0, 1, 3)
    )


def _gathered(values: Tensor, part: _Range) -> Tensor:
    """Keys or values of the range: [1, T, key heads, width] -> [1, key heads, keys, width]."""
    runs = [values[0, low:high] for low, high in (*part.above, (part.begin, part.end))]
    return (torch.cat(runs) if len(runs) > 1 else runs[0]).transpose(0, 1)[None]


def _spread(whole: Tensor, part: _Range, rows: Tensor) -> None:
    """Add what `_gathered` took to the places it was taken from."""
    at = 0
    for low, high in (*part.above, (part.begin, part.end)):
        whole[0, low:high] += rows[0, :, at : at + high - low].transpose(0, 1)
        at += high - low


def _ranges(micro: PackedMicroBatch) -> list[_Range]:
    """Cut [0, T) where it costs least: at the begin of a segment, or within a long one."""
    total, leaves = len(micro.input_ids), micro.leaves
    chunks = [np.arange(low, high, _CHUNK) for low, high in zip(micro.segment_starts[:-1], micro.segment_starts[1:], strict=True)]
    cuts = np.append(np.concatenate(chunks), total)
    depth = micro.positions[cuts[:-1]]
    best, origin = np.zeros(len(cuts)), np.zeros(len(cuts), np.int64)
    for end in range(1, len(cuts)):
        first = min(int(np.searchsorted(cuts, cuts[end] - _LONGEST_RANGE)), end - 1)
        tokens = cuts[end] - cuts[first:end]
        cost = best[first:end] + (tokens + _KEY_COST) * (depth[first:end] + tokens) + _CALL_COST
        origin[end] = first + int(cost.argmin())
        best[end] = cost[origin[end] - first]
    bounds = [len(cuts) - 1]
    while bounds[-1]:
        bounds.append(int(origin[bounds[-1]]))
    places = [int(cuts[bound]) for bound in reversed(bounds)]
    return [_range(leaves, begin, end) for begin, end in pairwise(places)]


def _range(leaves: np.ndarray, begin: int, end: int) -> _Range:
    above = np.flatnonzero(leaves[:begin] > begin)
    breaks = np.flatnonzero(np.diff(above) > 1) + 1
    runs = np.split(above, breaks) if len(above) else []
    keys = np.concatenate([above, np.arange(begin, end)])
    place = np.arange(begin, end)[:, None]
    return _Range(
        begin=begin,
        end=end,
        above=tuple((int(run[0]), int(run[-1]) + 1) for run in runs),
        sees=(keys[None, :] <= place) & (place < leaves[keys][None, :]),
    )
