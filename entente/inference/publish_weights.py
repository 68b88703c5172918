"""Writes the weights of a model that plays without a run: those of a base model, with an adapter merged if there is one.

The merged weight is W + scale * B @ A (Hu et al. 2021, arXiv 2106.09685), in the base's number format. Weights that are too
large are rounded to bfloat16, unless that loses too much of the adapter. Engines never merge: they add the adapter's product.
"""

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from entente.decoding.model_files import read_config
from entente.decoding.weight_files import WEIGHTS, stored_format, usual_mode, weight_files
from entente.records.policy_version import ADAPTER_CONFIG, ADAPTER_WEIGHTS, lora_scale
from entente.telemetry.errors import DataError, InputError

MERGE_LOSS_MAX = 0.05
"""Largest share of an update that merging may lose to rounding; ten small updates merged into bfloat16 lost 0.96."""
_PREFIX = "base_model.model."


def publish_weights(base: Path, adapter: Path | None, target: Path, most_bytes: float = math.inf) -> str:
    """Write `target`/model.safetensors, rounded to bfloat16 if it would exceed `most_bytes`; returns the dtype for its
    config, such as 'float32': if the weights have several, that of the base. `adapter` None: the base alone.

    Raises:
        InputError: the weights are too large, or rounding them would lose too much of the adapter; or see `weight_files`.
        DataError: the adapter is unreadable or belongs to another base model.
    """
    files = weight_files(base)
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    rounds = sum(tensor.nbytes for tensor in tensors.values()) > most_bytes
    dtype = torch.bfloat16 if rounds else None
    if (size := sum(tensor.numel() * (2 if rounds else tensor.itemsize) for tensor in tensors.values())) > most_bytes:
        raise InputError(
            f"the weights take {size / 1e6:.1f} MB in bfloat16, more than the {most_bytes / 1e6:.1f} MB that are left for them: "
            "publish a smaller model"
        )
    if adapter is not None:
        tensors, lost = add_adapter(tensors, adapter, dtype)
        if lost > MERGE_LOSS_MAX:
            raise InputError(
                f"merged into weights that are rounded to bfloat16 or float16, the adapter loses {lost:.0%} of what was learned, "
                f"more than {MERGE_LOSS_MAX:.0%}: take a smaller model or a version that has learned more, or `entente export` "
                "it as an adapter"
            )
    if adapter is None and not rounds and len(files) == 1:
        shutil.copyfile(files[0], target / WEIGHTS)
    else:
        whole = {name: (tensor if dtype is None else tensor.to(dtype)).contiguous() for name, tensor in tensors.items()}
        save_file(whole, target / WEIGHTS, metadata={"format": "pt"})
        usual_mode(target / WEIGHTS)
    formats = {str(dtype or tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()}
    return formats.pop() if len(formats) == 1 else stored_format(base, read_config(base))


def add_adapter(
    base: dict[str, torch.Tensor], adapter: Path, dtype: torch.dtype | None = None
) -> tuple[dict[str, torch.Tensor], float]:
    """`base` plus the peft adapter in `adapter`, in `dtype` (default: the base's); `base` is not changed.

    Also returns the share of the update lost to rounding: the Frobenius norm of the error over that of the update, over all
    merged weights. Raises DataError if the adapter is unreadable or belongs to another base model.
    """
    try:
        config = json.loads((adapter / ADAPTER_CONFIG).read_text())
        deltas = load_file(adapter / ADAPTER_WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"adapter '{adapter}' cannot be read: {error}") from error
    scale = lora_scale(config["r"], config["lora_alpha"], root=bool(config.get("use_rslora")))
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
