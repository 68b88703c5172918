"""The optimiser and the random generators as named tensors and plain values, and back, bit for bit.

Promise: a stored state is checked whole before any of it takes effect; nothing here is a pickle.
Never: touch a file.
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
    """What of the state is no tensor."""

    optimiser_groups: list[dict[str, Any]]
    """AdamW's parameter groups: learning rate and the like."""
    numpy_position: int
    """Place in numpy's Mersenne twister."""
    numpy_has_normal: int
    """1 if numpy holds a normal number that it has drawn ahead."""
    numpy_normal: float
    """That number."""
    python_version: int
    """Version of the state of Python's generator."""
    python_normal: float | None
    """A normal number that Python's generator has drawn ahead."""


def pack_state(optimiser: torch.optim.Optimizer, device: torch.device) -> tuple[dict[str, Tensor], StateValues]:
    """Everything that the next step's numbers rest on beside the weights; the generators of the GPUs only if `device` is one."""
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
    """A state that was checked against the optimiser that is to have it."""

    optimiser: dict[str, Any]
    """As `Optimizer.load_state_dict` takes it."""
    of_torch: Tensor
    of_numpy: tuple[str, np.ndarray, int, int, float]
    of_python: tuple[Any, ...]
    of_cuda: list[Tensor]
    """Of each GPU; empty for a state from a CPU."""

    def restore(self, optimiser: torch.optim.Optimizer, device: torch.device) -> None:
        """Put it in place of the optimiser's and the generators' own."""
        optimiser.load_state_dict(self.optimiser)
        torch.set_rng_state(self.of_torch)
        np.random.set_state(self.of_numpy)
        random.setstate(self.of_python)
        if device.type == "cuda":
            for number, state in enumerate(self.of_cuda[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, number)


def check_state(tensors: Mapping[str, Tensor], values: StateValues, optimiser: torch.optim.Optimizer) -> CheckedState:
    """What `pack_state` gave, made ready; nothing is changed yet.

    Raises:
        DataError: it is not the state of such an optimiser, or of a random generator.
    """
    try:
        python = (values.python_version, tuple(tensors["random.python"].tolist()), values.python_normal)
        words = tensors["random.numpy"].numpy().astype(np.uint32)
        numpy = ("MT19937", words, values.numpy_position, values.numpy_has_normal, values.numpy_normal)
        # Generators that nobody uses try the states first.
        torch.Generator().set_state(tensors["random.torch"])
        np.random.RandomState().set_state(numpy)
        if not 0 <= values.numpy_position <= len(words):
            raise ValueError("numpy's generator has no such position")
        random.Random().setstate(python)
        state = {"state": _moments(tensors, optimiser), "param_groups": _groups(values, optimiser)}
        gpus = sorted(int(name.removeprefix("random.cuda.")) for name in tensors if name.startswith("random.cuda."))
        cuda = [tensors[f"random.cuda.{number}"] for number in gpus]
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(f"the optimiser or a random generator has another state than this trainer's ({error})") from error
    return CheckedState(optimiser=state, of_torch=tensors["random.torch"], of_numpy=numpy, of_python=python, of_cuda=cuda)


def _moments(tensors: Mapping[str, Tensor], optimiser: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    """AdamW's tensors by the number of the parameter; none of a parameter that no update has changed yet."""
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
            raise ValueError(f"parameter {number} has other moments")
    return found


def _groups(values: StateValues, optimiser: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The parameter groups as they were, each option of the type that it has here."""
    found = []
    for own, stored in zip(optimiser.state_dict()["param_groups"], values.optimiser_groups, strict=True):
        group = {name: tuple(stored[name]) if isinstance(value, tuple) else stored[name] for name, value in own.items()}
        if own["params"] != group["params"] or any(type(group[name]) is not type(value) for name, value in own.items()):
            raise ValueError("an option of a parameter group is of another type")
        found.append(group)
    return found
