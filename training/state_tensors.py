"""Converts the state of the optimiser and the random generators to named tensors and plain values, and back, bit for bit.

A stored state is checked completely before any part of it is applied. No pickle is used.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from telemetry.errors import DataError

_ADAM_TENSORS = {"step", "exp_avg", "exp_avg_sq"}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedState:
    """A state that was found to fit the optimiser."""

    optimiser: dict[str, Any]
    """Argument for `Optimizer.load_state_dict`."""
    of_torch: Tensor
    of_numpy: tuple[str, np.ndarray, int, int, float]
    of_python: tuple[Any, ...]
    of_cuda: list[Tensor]
    """One per GPU; empty if the state was saved on a CPU."""

    def restore(self, optimiser: torch.optim.Optimizer, device: torch.device) -> None:
        """Apply the state to the optimiser and the global random generators."""
        optimiser.load_state_dict(self.optimiser)
        torch.set_rng_state(self.of_torch)
        np.random.set_state(self.of_numpy)
        random.setstate(self.of_python)
        if device.type == "cuda":
            for number, state in enumerate(self.of_cuda[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, number)


def check_state(tensors: Mapping[str, Tensor], values: StateValues, optimiser: torch.optim.Optimizer) -> CheckedState:
    """Check a state that `pack_state` made; nothing is changed.

    Raises:
        DataError: it does not fit this optimiser or a random generator.
    """
    try:
        python = (values.python_version, tuple(tensors["random.python"].tolist()), values.python_normal)
        words = tensors["random.numpy"].numpy().astype(np.uint32)
        numpy = ("MT19937", words, values.numpy_position, values.numpy_has_normal, values.numpy_normal)
        # Try the states on unused generators.
        torch.Generator().set_state(tensors["random.torch"])
        np.random.RandomState().set_state(numpy)
        if not 0 <= values.numpy_position <= len(words):
            raise ValueError("numpy's generator has no such position")
        random.Random().setstate(python)
        state = {"state": _check_moments(tensors, optimiser), "param_groups": _check_groups(values, optimiser)}
        gpus = sorted(int(name.removeprefix("random.cuda.")) for name in tensors if name.startswith("random.cuda."))
        cuda = [tensors[f"random.cuda.{number}"] for number in gpus]
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(f"the stored state does not fit this trainer's optimiser or random generators ({error})") from error
    return CheckedState(optimiser=state, of_torch=tensors["random.torch"], of_numpy=numpy, of_python=python, of_cuda=cuda)


def _check_moments(tensors: Mapping[str, Tensor], optimiser: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    """AdamW's tensors by parameter number; a parameter without an update has none."""
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    found: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimiser":
            number, _, moment = rest.partition(".")
            found.setdefault(int(number), {})[moment] = value
    for number, moments in found.items():
        shape = parameters[number].shape if 0 <= number < len(parameters) else None
        wanted = {name: torch.Size() if name == "step" else shape for name in _ADAM_TENSORS}
        if {name: value.shape for name, value in moments.items()} != wanted:
            raise ValueError(f"the moments of parameter {number} have other names or shapes")
    return found


def _check_groups(values: StateValues, optimiser: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The stored parameter groups, whose options must have the types of this optimiser's."""
    found = []
    for own, stored in zip(optimiser.state_dict()["param_groups"], values.optimiser_groups, strict=True):
        group = {name: tuple(stored[name]) if isinstance(value, tuple) else stored[name] for name, value in own.items()}
        if own["params"] != group["params"] or any(type(group[name]) is not type(value) for name, value in own.items()):
            raise ValueError("an option of a parameter group has another type")
        found.append(group)
    return found
