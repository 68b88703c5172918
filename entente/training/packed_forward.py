"""The forward of a packed micro-batch: hidden states at the positions that predict a branching token.

Results equal those of the padded forward, except for rounding. In the last layer only these positions are computed, as far as the
model's modules allow. `uncovered_reason` names the models that need the padded forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entente.training.packed_attention import RangeAttention, packed_attention_arguments
from entente.training.trie_plan import PackedMicroBatch


def uncovered_reason(model: Any) -> str | None:
    """Why the packed forward cannot be used for this peft model, in one sentence; None if it can."""
    causal = model.base_model.model
    if type(causal.lm_head) is not torch.nn.Linear:
        return "the adapter changes the head, of which the packed forward computes single rows"
    rotary = getattr(causal.config, "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (rotary, *rotary.values()) if isinstance(each, dict)}  # one, or one a layer type
    if kinds & {"dynamic", "longrope"}:
        return "the model's rotary frequencies depend on the length of its input, which packing changes"
    return None


def packed_hidden(causal: Any, micro: PackedMicroBatch) -> Tensor:
    """Last hidden states [H, width] at `micro.hidden_at`; `causal` is the causal model inside the peft model."""
    device = causal.lm_head.weight.device
    attention = RangeAttention(micro, device)
    at = to_device(micro.hidden_at, device)
    with _last_products_at(causal, at, micro.tokens):
        hidden = causal.model(
            input_ids=to_device(micro.input_ids, device)[None],
            position_ids=to_device(micro.positions, device)[None],
            use_cache=False,
            **packed_attention_arguments(causal.config, attention, device, attention.only(micro.hidden_at)),
        ).last_hidden_state
    return hidden[0].index_select(0, at)


@contextmanager
def _last_products_at(causal: Any, at: Tensor, tokens: int) -> Iterator[None]:
    """Compute the feed-forward part of the last layer only for the tokens `at`, int64 [H]; it returns 0 for the others
    of all `tokens`.

    With recomputed activations nothing changes, because the last layer runs once more in the backward.
    """
    if causal.training and torch.is_grad_enabled():
        yield
        return
    part = causal.model.layers[-1].mlp

    def narrow(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (given[0].index_select(1, at), *given[1:])

    def widen(_: Any, __: Any, found: Tensor) -> Tensor:
        whole = found.new_zeros(found.shape[0], tokens, found.shape[2])
        return whole.index_copy(1, at, found)

    before, after = part.register_forward_pre_hook(narrow), part.register_forward_hook(widen)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def legal_logits(head: torch.nn.Linear, hidden: Tensor, micro: PackedMicroBatch) -> Tensor:
    """Logits of the legal ids of the order tokens, float32 [D, K]. Only rows of the head whose ids are legal are computed."""
    device = hidden.device
    ids = to_device(micro.head_ids, device)
    bias = None if head.bias is None else head.bias.index_select(0, ids)
    logits = torch.nn.functional.linear(hidden, head.weight.index_select(0, ids), bias).float()
    at = to_device(micro.token_hidden[~micro.in_thought], device)[:, None] * len(ids) + to_device(micro.legal_columns, device)
    return logits.flatten().index_select(0, at.flatten()).view(at.shape)


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor on `device`; a copy to a GPU is asynchronous."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
