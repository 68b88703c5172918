"""The forward of a packed micro-batch: hidden states where a branching token is predicted, each token path computed once.

Promise: the same numbers as the padded forward but for the order of sums; models that it does not cover are named by
`uncovered_reason`, and take the padded path.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.packed_attention import DenseAttention, PackedAttention, RangeAttention, packed_attention_arguments
from training.trie_plan import PackedMicroBatch

COVERED = ("llama", "qwen2", "qwen3")
"""Values of `model_type` whose layers hand keyword arguments on to the attention, and know no position but `position_ids`."""


def uncovered_reason(model: Any) -> str | None:
    """Why the packed forward does not fit this peft model, in one sentence; None if it does."""
    causal = model.base_model.model
    config = causal.config
    if config.model_type not in COVERED:
        return f"the packed forward knows {', '.join(COVERED)} and not '{config.model_type}'"
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        return "the model has layers with a sliding window, which the packed forward does not know"
    if type(causal.lm_head) is not torch.nn.Linear:
        return "the adapter changes the head, of which the packed forward takes single rows"
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") in ("dynamic", "longrope"):
        return "the model's rotary frequencies depend on the length of what it reads, which packing changes"
    return None


def attention_kinds(wanted: str, device: torch.device) -> tuple[str, ...]:
    """Kinds of packed attention to try on a device, the quickest first; `wanted` alone, unless it is auto."""
    if wanted != "auto":
        return (wanted,)
    return ("ranges", "dense") if device.type == "cpu" else ("flex", "dense")


def attention_for(micro: PackedMicroBatch, kind: str, device: torch.device) -> PackedAttention:
    """The attention of a micro-batch; `kind`: auto, ranges (CPU), flex or varlen (CUDA; varlen for 16 bits only), dense."""
    if kind == "auto":
        kind = attention_kinds(kind, device)[0]
    if kind == "ranges":
        return RangeAttention(micro)
    if kind == "dense":
        return DenseAttention(micro, device)
    from training import packed_attention_gpu as gpu

    return {"flex": gpu.FlexAttention, "varlen": gpu.VarlenAttention}[kind](micro, device)


def packed_hidden(causal: Any, micro: PackedMicroBatch, kind: str = "auto") -> Tensor:
    """Last hidden states [H, width] at `micro.hidden_at`; `causal`: the causal model within peft's."""
    device = causal.lm_head.weight.device
    hidden = causal.model(
        input_ids=to_device(micro.input_ids, device)[None],
        position_ids=to_device(micro.positions, device)[None],
        use_cache=False,
        **packed_attention_arguments(causal.config, attention_for(micro, kind, device), device),
    ).last_hidden_state
    return hidden[0].index_select(0, to_device(micro.hidden_at, device))


def legal_logits(head: torch.nn.Linear, hidden: Tensor, micro: PackedMicroBatch) -> Tensor:
    """Logits [B, K] of the legal ids, in float32, from the rows of the head that are legal somewhere in the micro-batch."""
    device = hidden.device
    ids = to_device(micro.head_ids, device)
    bias = None if head.bias is None else head.bias.index_select(0, ids)
    logits = torch.nn.functional.linear(hidden, head.weight.index_select(0, ids), bias).float()
    at = to_device(micro.token_hidden, device)[:, None] * len(ids) + to_device(micro.legal_columns, device)
    return logits.flatten().index_select(0, at.flatten()).view(at.shape)


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor; on its way to a GPU while the CPU goes on."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
