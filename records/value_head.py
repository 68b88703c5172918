"""Value heads as files: the weights of a head, and the base model that it was trained on.

A head reads the last hidden state h of a prompt's last token, where the model has read board and power:

    v = W norm(h) + b          v[0]: expected share of squared centres at the end; v[1]: expected centres at the end / 18

The norm is a layer norm with weights of its own. `value_head.safetensors` lies beside an adapter, or in the folder `value_head/`
of a base model, because engines take every safetensors file of a model's own folder for weights. This module trains nothing and
does not import torch.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from decoding.model_files import base_identity, read_config
from game.scores import SOLO_CENTRES
from telemetry.errors import DataError, InputError

HEAD_FILE = "value_head.safetensors"
CENTRES_SCALE = float(SOLO_CENTRES)
"""Centres that count as 1, so that both figures have the same order."""
AVERAGES = (1 / 7, 34 / 7 / CENTRES_SCALE)
"""What an untrained head says: the mean share of squares, and the mean of all 34 centres."""
_EPSILON = 1e-5

_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """The weights of a head for hidden states of some width."""

    norm_weight: _Floats
    """[width]"""
    norm_bias: _Floats
    """[width]"""
    weight: _Floats
    """[2, width]"""
    bias: _Floats
    """[2]"""

    def values(self, hidden: _Floats) -> _Floats:
        """Values [n, 2] of hidden states [n, width]."""
        centred = hidden - hidden.mean(1, keepdims=True)
        normed = centred / np.sqrt(np.square(centred).mean(1, keepdims=True) + _EPSILON)
        return (normed * self.norm_weight + self.norm_bias) @ self.weight.T + self.bias


def base_head(model: Path) -> Path:
    """Path of the head of the base model in the folder `model`; few models have one."""
    return model / "value_head" / HEAD_FILE


def write_head(file: Path, weights: HeadWeights, base: str) -> None:
    """Write a head for the base model with the identity `base` (`base_identity`)."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(save(asdict(weights), metadata={"base": base}))


def read_head(file: Path, model: Path) -> HeadWeights:
    """The head in `file`, for the base model in the folder `model`.

    Raises:
        InputError: it was trained on another base model.
        DataError: the file is missing or damaged.
    """
    try:
        with safe_open(file, framework="numpy") as stored:
            base = dict(stored.metadata() or {}).get("base", "")
            found = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  # it is no mapping
        weights = HeadWeights(**found)
    except (OSError, SafetensorError, TypeError) as error:
        raise DataError(f"value head '{file}' is missing or damaged ({error}): restore it") from error
    width = int(read_config(model)["hidden_size"])
    if base != base_identity(model) or weights.weight.shape != (2, width):
        raise InputError(
            f"value head '{file}' is of another base model than '{model}' (width {weights.weight.shape[-1]} and {width}): "
            "use it with its own base, or take it away; nothing was trained on"
        )
    return weights
