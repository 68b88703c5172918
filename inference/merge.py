"""Merges an adapter into the base weights, as a partial checkpoint that a running engine can reload.

The merged weight is W + scale * B @ A (Hu et al. 2021, arXiv 2106.09685). On a CPU, LoRA slots are ten times slower than the base
model, so merged weights are served there. Merging is exact in float32; bfloat16 rounds small updates away.
"""

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from decoding.architectures import read_architecture
from telemetry.errors import DataError

MERGE_LOSS_MAX = 0.05
"""Largest share of an update that merging may lose to rounding; ten small updates merged into bfloat16 lost 0.96."""
_PREFIX = "base_model.model."


def load_base(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of the base model in `folder` that an engine must reload with a merged adapter, by name.

    These are all tensors of the attention and feed-forward parts that an adapter may change, since engines fuse layers of one
    part. The weights of experts are not among them: vLLM on a CPU cannot load them a second time.

    Raises:
        DataError: there are no safetensors files.
        InputError: see `read_architecture`.
    """
    parts = {path.rpartition(".")[0] for path in read_architecture(folder).linear_layers()}
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            tensors |= {name: stored.get_tensor(name) for name in stored.keys() if name.rsplit(".", 2)[0] in parts}  # noqa: SIM118
    if not tensors:
        raise DataError(f"'{folder}' holds no safetensors weights")
    return tensors


def merge_adapter(base: dict[str, torch.Tensor], adapter: Path, target: Path) -> float:
    """Write `base` plus the peft adapter in the folder `adapter` to `target`/model.safetensors; `base` is not changed.

    Returns:
        share of the update lost to rounding; see `add_adapter`.

    Raises:
        DataError: the adapter is unreadable or belongs to another base model.
    """
    merged, lost = add_adapter(base, adapter)
    target.mkdir(parents=True, exist_ok=True)
    save_file(merged, target / "model.safetensors")
    return lost


def add_adapter(
    base: dict[str, torch.Tensor], adapter: Path, dtype: torch.dtype | None = None
) -> tuple[dict[str, torch.Tensor], float]:
    """`base` plus the peft adapter in the folder `adapter`; `base` is not changed.

    Args:
        dtype: number format of the merged weights; default: the base's.

    Returns:
        (all weights by name, share of the update lost to rounding: the Frobenius norm of the rounding error over all merged
        weights, divided by that of the update).

    Raises:
        DataError: the adapter is unreadable or belongs to another base model.
    """
    try:
        config = json.loads((adapter / "adapter_config.json").read_text())
        deltas = load_file(adapter / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"adapter '{adapter}' cannot be read: {error}") from error
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    merged, error, whole = dict(base), 0.0, 0.0
    for key in deltas:
        if not key.endswith(".lora_A.weight"):
            continue
        name = key.removeprefix(_PREFIX).removesuffix(".lora_A.weight") + ".weight"
        weight = base.get(name)
        a, b = deltas[key], deltas.get(key.replace(".lora_A.", ".lora_B."))
        if weight is None or b is None or weight.shape != (b.shape[0], a.shape[1]):
            raise DataError(f"adapter '{adapter}' does not fit this base model at {name}")
        update = scale * (b.float() @ a.float())
        merged[name] = (weight.float() + update).to(dtype or weight.dtype)
        error += float((merged[name].float() - weight.float() - update).square().sum())
        whole += float(update.square().sum())
    return merged, math.sqrt(error / whole) if whole else 0.0
