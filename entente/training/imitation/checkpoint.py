"""Checkpoints of imitation: one safetensors file with the whole state after a step.

A file is complete or absent, and hashed. The newest two are kept: if one is damaged, training repeats the steps since the other.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as tensor_bytes
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from entente.telemetry.errors import DataError, InputError
from entente.telemetry.progress import reporter
from entente.training.checkpoint import StateValues, pack_state, restore_state
from storage.files import names_in, publish_once

_KEPT = 2
_MODEL = "model."
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The last fields are as in `HeldOutFigures`."""

    step: int
    tokens: int
    loss: float | None
    """Mean since the point before, nats; None before the first step."""
    completion_loss: float
    order_loss: float
    orders_equal: float


@dataclass(kw_only=True)
class ImitationState:
    step: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    curve: list[CurvePoint] = field(default_factory=list)


_STATE, _VALUES = TypeAdapter(ImitationState), TypeAdapter(StateValues)


def save_state(folder: Path, state: ImitationState, model: Any, optimiser: torch.optim.Optimizer) -> None:
    """Publish the state, then remove all files but the newest two."""
    tensors, values = pack_state(optimiser, _CPU)
    tensors |= {_MODEL + name: weight.detach().contiguous() for name, weight in model.named_parameters()}
    texts = {"state": json.dumps(asdict(state)), "values": json.dumps(asdict(values))}
    content = tensor_bytes(tensors, metadata=texts | {"hash": _hash(tensors, texts)})
    publish_once(folder / f"step_{state.step:06d}.safetensors", lambda temp: temp.write_bytes(content))
    for name in _names(folder)[:-_KEPT]:
        (folder / name).unlink(missing_ok=True)


def load_state(folder: Path, model: Any, optimiser: torch.optim.Optimizer) -> ImitationState:
    """Restore from the newest intact file, and remove damaged ones; without a file, the state before the first step.

    Raises InputError if a release with another optimiser wrote it."""
    for name in reversed(_names(folder)):
        try:
            return _load(folder / name, model, optimiser)
        except DataError as error:
            reporter().say(f"{error}; using the one before it")
            (folder / name).unlink(missing_ok=True)
    return ImitationState()


def _load(file: Path, model: Any, optimiser: torch.optim.Optimizer) -> ImitationState:
    try:
        with safe_open(file, framework="pt") as stored:
            texts = dict(stored.metadata())
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  # not a mapping
        if texts.pop("hash", "") != _hash(tensors, texts):
            raise ValueError("its hash does not match")
        state = _STATE.validate_json(texts["state"])
        values = _VALUES.validate_json(texts["values"], strict=True)
        weights = {name.removeprefix(_MODEL): tensors.pop(name) for name in list(tensors) if name.startswith(_MODEL)}
        own = dict(model.named_parameters())
        if {name: each.shape for name, each in own.items()} != {name: each.shape for name, each in weights.items()}:
            raise ValueError("its weights have other names or shapes")
    except (SafetensorError, ValidationError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"checkpoint '{file}' is damaged ({error})") from error
    if len(values.optimiser_groups) != len(optimiser.param_groups):
        raise InputError(f"'{file}' is of a release with another optimiser: go on with that release, or choose another name")
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
    restore_state(tensors, values, optimiser, _CPU)
    return state


def _names(folder: Path) -> list[str]:
    """Oldest first, also where a step has seven digits."""
    return sorted((name for name in names_in(folder) if name.startswith("step_")), key=lambda name: (len(name), name))


def _hash(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    parts = [name.encode() + tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name in sorted(tensors)]
    return xxh3_64_hexdigest(b"".join(parts) + json.dumps(texts, sort_keys=True).encode())
