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


def use_packed_attention(config: Any) -> None:
    """Have the model of `config` call `_attend`: for good, since layers that are computed again on the way back must attend as
    they did on the way there, and compiled ones are compiled for one name."""
    config._attn_implementation = _NAME


def packed_attention_arguments(config: Any, attention: PackedAttention, device: torch.device) -> dict[str, Any]:
    """Arguments that have the model of `config` attend so. Its other forwards stay what they are."""
    use_packed_attention(config)
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
    keys: Tensor
    """int64 [keys]: the tokens before `begin` that the first token sees, then the range itself."""
    sees: np.ndarray
    """bool [end - begin, keys]."""


class RangeAttention:
    """Range after range, through torch's fused CPU attention; the heads that share a key lie side by side as rows of a call.

    Within it values are [key heads, T, heads / key heads, width], so that a range's rows are a view; keys come by one gathering.
    """

    def __init__(self, micro: PackedMicroBatch) -> None:
        self._ranges = _ranges(micro)
        self._masks: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """As `PackedAttention`."""
        shared_by = query.shape[1] // key.shape[1]
        masks = self._masks.get((shared_by, query.dtype))
        if masks is None:
            masks = self._masks[shared_by, query.dtype] = [_additive(part.sees, shared_by, query.dtype) for part in self._ranges]
        rows = query[0].unflatten(0, (key.shape[1], shared_by)).transpose(1, 2)
        attended: Any = _Ranges.apply(rows, torch.stack((key[0], value[0])), self._ranges, masks, scale)
        return attended.permute(1, 0, 2, 3).flatten(1, 2)[None]


def _additive(sees: np.ndarray, shared_by: int, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~torch.from_numpy(sees), float("-inf"))
    return mask.repeat_interleave(shared_by, 0)


class _Ranges(torch.autograd.Function):
    """Forward and backward over the ranges; gradients of keys and values are added where they were gathered from."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, seen: Tensor, parts: list[_Range], masks: list[Tensor], scale: float
    ) -> Tensor:
        """Query [key heads, T, sharing, width], keys and values as one [2, key heads, T, width]; returns what query is like."""
        query = query.contiguous()
        attended, sums = torch.empty_like(query), []
        for part, mask in zip(parts, masks, strict=True):
            keys, values = seen.index_select(2, part.keys)
            found, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _rows(query, part), keys[None], values[None], attn_mask=mask, scale=scale
            )
            _rows(attended, part).copy_(found)
            sums.append(logsumexp)
        ctx.save_for_backward(query, seen, attended, *sums)
        ctx.parts, ctx.masks, ctx.scale = parts, masks, scale
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """The same ranges once more."""
        query, seen, attended, *sums = ctx.saved_tensors
        gradient, of_query, of_seen = gradient.contiguous(), torch.empty_like(query), torch.zeros_like(seen)
        for part, mask, logsumexp in zip(ctx.parts, ctx.masks, sums, strict=True):
            keys, values = seen.index_select(2, part.keys)
            by_query, by_key, by_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _rows(gradient, part),
                _rows(query, part),
                keys[None],
                values[None],
                _rows(attended, part),
                logsumexp,
                0.0,
                False,
                attn_mask=mask,
                scale=ctx.scale,
            )
            _rows(of_query, part).copy_(by_query)
            of_seen.index_add_(2, part.keys, torch.cat((by_key, by_value)))
        return of_query, of_seen, None, None, None


def _rows(values: Tensor, part: _Range) -> Tensor:
    """A range of [key heads, T, sharing, width] as [1, key heads, tokens of the range * sharing, width]: a view."""
    return values[:, part.begin : part.end].flatten(1, 2)[None]


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
    keys = np.concatenate([above, np.arange(begin, end)])
    place = np.arange(begin, end)[:, None]
    return _Range(
        begin=begin,
        end=end,
        keys=torch.from_numpy(keys),
        sees=(keys[None, :] <= place) & (place < leaves[keys][None, :]),
    )
