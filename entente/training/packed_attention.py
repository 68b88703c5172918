"""Attention over a forest of token paths in depth-first order: each token sees its ancestors and itself.

Token q sees token k exactly if k <= q < leave[k] (`micro_batches.py`), so a range sees, before itself, only ancestors of its
first token. The forest is split into ranges of lowest estimated cost; each is one call of torch's fused attention over gathered
keys. A sliding window bounds the distance of positions. `flex_attention.py` is the other attention, for a GPU alone. Both are
registered in transformers' attention registry; models are not modified.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from entente.training.micro_batches import MicroBatch

PackedAttention = Callable[[Tensor, Tensor, Tensor, float, int | None], Tensor]
"""query [1, heads, T, width], key and value [1, key heads, T, width], scale, window -> [1, T, heads, width].

`window`: positions that a token sees, its own included; None: all of its ancestors."""
_NAMES = {"ranges": "entente_ranges", "flex": "entente_flex"}
_CHUNK = 128
"""Tokens between possible splits of a segment. Shorter ranges compute fewer masked query-key pairs."""
_KEY_COST = 4
"""Of gathering one key, in query-key pairs; measured with tiny models on one CPU thread."""


class _CallCost(NamedTuple):
    pairs: int
    longest: int
    """Tokens of the longest range; a mask has them times their keys."""


_CALL_COSTS = {"cpu": _CallCost(2000, 1024), "cuda": _CallCost(1_000_000, 2048)}
"""By device. CUDA: a step of a 7B shape on an H200 took 2.1 s with 90 ranges in each of 28 layers, of which its products explain
0.7 s: 0.5 ms a range, worth some million pairs. Unmeasured with this value."""


@torch.compiler.disable  # attention has kernels of its own, and a new object for each micro-batch would recompile the block
def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Any]:
    packed: PackedAttention | None = options.pop("packed_attention", None)
    in_last_layer: PackedAttention | None = options.pop("attention_in_last_layer", None)
    if in_last_layer is not None and module.layer_idx == module.config.num_hidden_layers - 1:
        packed = in_last_layer
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return packed(query, key, value, options["scaling"], options.get("sliding_window")), None


for _name in _NAMES.values():
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def use_packed_attention(config: Any, kind: Literal["ranges", "flex"]) -> None:
    """Permanent: recomputed layers must use the same attention in the backward."""
    config._attn_implementation = _NAMES[kind]
    # torch 2.11 and later prefer cuDNN's attention on Hopper. It builds a plan for each new shape, 0.2 s on an H200, and nearly
    # each range has a shape of its own.
    torch.backends.cuda.enable_cudnn_sdp(False)


def uses_flex(config: Any) -> bool:
    """A model without a chosen attention gets ranges."""
    if config._attn_implementation not in _NAMES.values():
        use_packed_attention(config, "ranges")
    return config._attn_implementation == _NAMES["flex"]


def packed_attention_arguments(
    attention: PackedAttention, device: torch.device, in_last_layer: PackedAttention | None = None
) -> dict[str, Any]:
    """Arguments of one forward that use `attention`, and `in_last_layer` in the last layer."""
    # transformers passes a 4-dimensional mask on unchanged. With a 2-dimensional one packed decisions would see each other, and
    # without a mask transformers would try to detect packing itself.
    mask = torch.empty((1, 1, 1, 0), device=device)
    return {"packed_attention": attention, "attention_in_last_layer": in_last_layer, "attention_mask": mask}


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Asynchronous to a GPU."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@dataclass(frozen=True, slots=True)
class _Range:
    begin: int
    end: int
    """Rows in the queries, end exclusive."""
    tokens: Tensor
    """int64 [end - begin]: the token of each row."""
    keys: Tensor
    """int64 [keys]: ancestors of the first token, then the range."""


class RangeAttention:
    """Torch's fused attention, one call per range: a `PackedAttention`. Heads that share a key head become rows of the same call.

    Queries are [key heads, T, heads / key heads, width], so that the rows of a range are a view. The device computes the masks
    from `leaves`: as many pairs as the attention, and the host would need longer for them than for all else that it does."""

    def __init__(self, micro: MicroBatch, device: torch.device) -> None:
        leaves, bounds = micro.leaves, _split(micro, _CALL_COSTS["cpu" if device.type == "cpu" else "cuda"])
        keys = [np.append(np.flatnonzero(leaves[:begin] > begin), np.arange(begin, end)) for begin, end in bounds]
        self._leaves, self._positions = to_device(leaves, device), to_device(micro.positions, device)
        tokens, on_device = torch.arange(micro.tokens, device=device), to_device(np.concatenate(keys), device)
        parts = zip(bounds, on_device.split([len(each) for each in keys]), strict=True)
        self._ranges = [_Range(begin, end, tokens[begin:end], seen) for (begin, end), seen in parts]
        self._wanted: Tensor | None = None
        self._deepest = int(micro.positions.max())
        self._masks: dict[tuple[int, torch.dtype, int | None], list[Tensor]] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        shared_by = query.shape[1] // key.shape[1]
        window = None if window is None or window > self._deepest else window
        masks = self._masks.get((shared_by, query.dtype, window))
        if masks is None:
            masks = [self._additive(part, shared_by, query.dtype, window) for part in self._ranges]
            self._masks[shared_by, query.dtype, window] = masks
        rows = query[0].unflatten(0, (key.shape[1], shared_by)).transpose(1, 2)
        seen, ranges = torch.stack((key[0], value[0])), _CpuRanges if query.device.type == "cpu" else _Ranges
        if self._wanted is None:
            attended: Any = ranges.apply(rows, seen, self._ranges, masks, scale)
        else:
            of_wanted: Any = ranges.apply(rows.index_select(1, self._wanted), seen, self._ranges, masks, scale)
            attended = torch.zeros_like(rows).index_copy(1, self._wanted, of_wanted)
        return attended.permute(1, 0, 2, 3).flatten(1, 2)[None]

    def only(self, wanted: np.ndarray) -> "RangeAttention":
        """Only for the `wanted` tokens, int64 [W], ascending; the others get 0."""
        narrowed = copy(self)
        narrowed._wanted, narrowed._masks = to_device(wanted, self._leaves.device), {}
        ends = np.searchsorted(wanted, [part.end for part in self._ranges]).tolist()
        narrowed._ranges = [
            replace(part, begin=begin, end=end, tokens=narrowed._wanted[begin:end])
            for part, (begin, end) in zip(self._ranges, pairwise([0, *ends]), strict=True)
            if begin < end
        ]
        return narrowed

    def _additive(self, part: _Range, shared_by: int, dtype: torch.dtype, window: int | None) -> Tensor:
        """[rows * shared_by, keys]: 0 where a token sees a key, else -inf. Keys outside every window are computed and masked."""
        token = part.tokens[:, None]
        sees = (part.keys <= token) & (token < self._leaves[part.keys])
        if window is not None:
            sees &= self._positions[token] - self._positions[part.keys] < window
        mask = torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, float("-inf"))
        return mask.repeat_interleave(shared_by, 0)


class _Ranges(torch.autograd.Function):
    """The backward gathers each range again instead of keeping a copy of a prompt's keys per range below it."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, seen: Tensor, parts: list[_Range], masks: list[Tensor], scale: float
    ) -> Tensor:
        query = query.contiguous()
        attended = torch.empty_like(query)
        for part, mask in zip(parts, masks, strict=True):
            keys, values = seen.index_select(2, part.keys)
            _rows(attended, part).copy_(_attend_range(_rows(query, part), keys, values, mask, scale))
        ctx.save_for_backward(query, seen)
        ctx.parts, ctx.masks, ctx.scale = parts, masks, scale
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """Key gradients are summed in float32, because a prompt's keys get many."""
        query, seen = ctx.saved_tensors
        of_query, sums = torch.empty_like(query), torch.zeros_like(seen, dtype=torch.promote_types(seen.dtype, torch.float32))
        gradient = gradient.contiguous()
        for part, mask in zip(ctx.parts, ctx.masks, strict=True):
            rows, gathered = (each.detach().requires_grad_() for each in (_rows(query, part), seen.index_select(2, part.keys)))
            with torch.enable_grad():
                keys, values = gathered.unbind()
                attended = _attend_range(rows, keys, values, mask, ctx.scale)
            by_query, by_gathered = torch.autograd.grad(attended, (rows, gathered), _rows(gradient, part))
            _rows(of_query, part).copy_(by_query)
            sums.index_add_(2, part.keys, by_gathered.to(sums.dtype))
        return of_query, sums.to(seen.dtype), None, None, None


def _attend_range(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, keys[None], values[None], attn_mask=mask, scale=scale)


class _CpuRanges(torch.autograd.Function):
    """`_Ranges` on torch's CPU kernel, which keeps what the backward needs."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, seen: Tensor, parts: list[_Range], masks: list[Tensor], scale: float
    ) -> Tensor:
        """`query`: [key heads, T, heads / key heads, width]; `seen`: keys and values, [2, key heads, T, width]."""
        query = query.contiguous()
        attended, sums = torch.empty_like(query), []
        for part, mask in zip(parts, masks, strict=True):
            keys, values = seen.index_select(2, part.keys)
            output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _rows(query, part), keys[None], values[None], attn_mask=mask, scale=scale
            )
            _rows(attended, part).copy_(output)
            sums.append(logsumexp)
        ctx.save_for_backward(query, seen, attended, *sums)
        ctx.parts, ctx.masks, ctx.scale = parts, masks, scale
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
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
    """View [1, key heads, tokens of the range * shared_by, width] of [key heads, T, shared_by, width]."""
    return values[:, part.begin : part.end].flatten(1, 2)[None]


def _split(micro: MicroBatch, call: _CallCost) -> list[tuple[int, int]]:
    """Ranges of lowest total cost, by dynamic programming; they begin at a segment's start or every _CHUNK tokens after it."""
    chunks = [np.arange(low, high, _CHUNK) for low, high in zip(micro.segment_starts[:-1], micro.segment_starts[1:], strict=True)]
    cuts = np.append(np.concatenate(chunks), micro.tokens)
    depth = micro.positions[cuts[:-1]]
    best, origin = np.zeros(len(cuts)), np.zeros(len(cuts), np.int64)
    for end in range(1, len(cuts)):
        first = min(int(np.searchsorted(cuts, cuts[end] - call.longest)), end - 1)
        tokens = cuts[end] - cuts[first:end]
        cost = best[first:end] + (tokens + _KEY_COST) * (depth[first:end] + tokens) + call.pairs
        origin[end] = first + int(cost.argmin())
        best[end] = cost[origin[end] - first]
    bounds = [len(cuts) - 1]
    while bounds[-1]:
        bounds.append(int(origin[bounds[-1]]))
    return list(pairwise(int(cuts[bound]) for bound in reversed(bounds)))
