"""Converts the state of the optimiser and the random generators to named tensors and plain values, and back, bit for bit.

No pickle is used. Whoever stores a state guards it with a hash, and applies only what the hash fits.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateValues:
    """The part of the state that is not tensors."""

    optimiser_groups: list[dict[str, Any]]
    """AdamW's parameter groups: learning rate and the like."""
    numpy_position: int
    """Position in numpy's Mersenne twister."""
    numpy_has_normal: int
    """1 if numpy's generator stores a normal number for its next call."""
    numpy_normal: float
    """That number."""
    python_version: int
    """Version of the state format of Python's generator."""
    python_normal: float | None
    """The normal number that Python's generator stores for its next call."""


def seed_generators(seed: int) -> None:
    """Seed all generators whose state a checkpoint holds, so that equal steps leave equal checkpoints."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def pack_state(optimiser: torch.optim.Optimizer, device: torch.device) -> tuple[dict[str, Tensor], StateValues]:
    """The state that determines the next step beside the weights; GPU generators only if `device` is a GPU."""
    state = optimiser.state_dict()
    tensors = {f"optimiser.{number}.{name}": value for number, each in state["state"].items() for name, value in each.items()}
    _, keys, position, has_normal, normal = np.random.get_state()
    version, words, python_normal = random.getstate()
    tensors["random.torch"] = torch.get_rng_state()
    tensors["random.numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    tensors["random.python"] = torch.tensor(words, dtype=torch.int64)
    if device.type == "cuda":
        tensors |= {f"random.cuda.{number}": each for number, each in enumerate(torch.cuda.get_rng_state_all())}
    values = StateValues(
        optimiser_groups=state["param_groups"],
        numpy_position=int(position),
        numpy_has_normal=int(has_normal),
        numpy_normal=float(normal),
        python_version=version,
        python_normal=python_normal,
    )
    return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}, values


def restore_state(
    tensors: Mapping[str, Tensor], values: StateValues, optimiser: torch.optim.Optimizer, device: torch.device
) -> None:
    """Apply what `pack_state` made for an optimiser of equal parameters."""
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimiser."):
            _, number, moment = name.split(".")
            moments.setdefault(int(number), {})[moment] = value
    groups = [group | {"betas": tuple(group["betas"])} for group in values.optimiser_groups]
    optimiser.load_state_dict({"state": moments, "param_groups": groups})
    torch.set_rng_state(tensors["random.torch"])
    words = tensors["random.numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, values.numpy_position, values.numpy_has_normal, values.numpy_normal))
    random.setstate((values.python_version, tuple(tensors["random.python"].tolist()), values.python_normal))
    if device.type == "cuda":
        for number in range(torch.cuda.device_count()):
            if (state := tensors.get(f"random.cuda.{number}")) is not None:
                torch.cuda.set_rng_state(state, number)
