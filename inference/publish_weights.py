"""Writes the weights of a model that plays without a run: those of a base model, with an adapter merged if there is one.

The number format is the base's own. Weights that would not fit are rounded to bfloat16, unless that loses more of the adapter
than an engine may lose.
"""

import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from decoding.model_files import weight_files
from inference.merge import MERGE_LOSS_MAX, add_adapter
from telemetry.errors import InputError

WEIGHTS = "model.safetensors"


def publish_weights(base: Path, adapter: Path | None, target: Path, most_bytes: float = math.inf) -> str:
    """Write `target`/model.safetensors, at most `most_bytes` long; returns the number format, such as 'float32'.

    Args:
        base: folder of the base model.
        adapter: folder of the adapter; None: the base alone.
        most_bytes: weights that take more are rounded to bfloat16.

    Raises:
        InputError: the weights are too large, or rounding them would lose too much of the adapter.
        DataError: the adapter is unreadable or belongs to another base model.
    """
    files = weight_files(base)
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if not tensors:
        raise InputError(f"model '{base}' has no safetensors weights: save it with `save_pretrained`")
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
    found = {str(tensor.dtype if dtype is None else dtype).removeprefix("torch.") for tensor in tensors.values()}
    return ", ".join(sorted(found))
