"""Checkpoints: the trainer's whole state after a step.

`checkpoints/step_000123/` holds the adapter in peft's layout, optimiser and RNG state (`trainer.safetensors`), the newest
ledgers, and a manifest, written last: step, non-tensor values, size and SHA-256 of each file, and its own checksum. A folder that
does not match it is not a checkpoint. No file is a pickle. Written under another name, fsynced and renamed: complete or absent
after a kill.
"""

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from entente.decoding.base_identity import file_hash
from entente.records.policy_version import ADAPTER_FILES
from entente.telemetry.errors import DataError, InputError
from entente.training.policy import AdapterCopy, Policy, write_adapter
from storage.files import publish_directory, remove_folder, write_measured
from storage.json_files import is_sealed, read_object, sealed
from storage.ledger import STEP_NAME
from storage.runs import CHECKPOINT_MANIFEST, RunPaths, checkpoint_steps
from storage.update_log import UpdateLog

_FORMAT = 3
_TENSORS = "trainer.safetensors"
_FILES = {*ADAPTER_FILES, _TENSORS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    step: int
    """Steps done; the policy version of its adapter."""
    settings_hash: str
    skipped_in_a_row: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """If the run was killed before it logged them, the resumed run does."""
    update_log: UpdateLog | None = None
    """For replays; None in checkpoints of early releases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateValues:
    """Optimiser and RNG state that is not tensors."""

    optimiser_groups: list[dict[str, Any]]
    numpy_position: int
    numpy_has_normal: int
    """1 if numpy's generator holds a normal for its next call."""
    numpy_normal: float
    python_version: int
    python_normal: float | None
    """The normal that Python's generator holds for its next call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopy:
    """What a checkpoint holds of the trainer's memory, copied to the host, so that training may continue while it is written."""

    adapter: AdapterCopy
    tensors: dict[str, Tensor]
    values: StateValues

    @classmethod
    def of(cls, policy: Policy, optimiser: torch.optim.Optimizer) -> "StateCopy":
        tensors, values = pack_state(optimiser, policy.device)
        return cls(adapter=policy.copy_adapter(), tensors=tensors, values=values)


def save_checkpoint(paths: RunPaths, state: Checkpoint, copied: StateCopy, keep: int, ledgers: Sequence[Path] = ()) -> Path:
    """Write durably, then remove all but the newest `keep`. Raises DataError if a checkpoint of that step exists."""
    final = paths.checkpoint(state.step)
    aside = final.with_name(f".{final.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        _write(aside, state, copied, ledgers)
        publish_directory(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # exists only after a failure; it would keep a full disk full
    for old in checkpoint_steps(paths)[:-keep]:
        remove_folder(paths.checkpoint(old))
    return final


def _write(aside: Path, state: Checkpoint, copied: StateCopy, ledgers: Sequence[Path]) -> None:
    files = write_adapter(aside, copied.adapter)
    files[_TENSORS] = write_measured(aside / _TENSORS, tensor_bytes(copied.tensors))
    for ledger in ledgers:
        with ledger.open("rb") as content:
            files[ledger.name] = write_measured(aside / ledger.name, content)
    record = {"format": _FORMAT, **asdict(state), "values": asdict(copied.values), "files": dict(sorted(files.items()))}
    (aside / CHECKPOINT_MANIFEST).write_text(sealed(record))


def load_checkpoint(paths: RunPaths, step: int, policy: Policy, optimiser: torch.optim.Optimizer) -> Checkpoint:
    """Restore policy, optimiser and random generators bit for bit. On an error nothing changes.

    Raises DataError for a damaged file or another step, and InputError for another release's format."""
    folder = paths.checkpoint(step)
    state, values = _verified(folder)
    if state.step != step:
        raise DataError(f"checkpoint '{folder}' is of step {state.step}, but its folder is that of step {step}")
    try:
        tensors = load_tensors((folder / _TENSORS).read_bytes())
        policy.load_adapter(folder)
    except (DataError, SafetensorError) as error:
        raise DataError(f"checkpoint '{folder}' does not fit this trainer: {error}") from error
    restore_state(tensors, values, optimiser, policy.device)
    return state


def _verified(folder: Path) -> tuple[Checkpoint, StateValues]:
    try:
        record = read_object(folder / CHECKPOINT_MANIFEST)
    except (FileNotFoundError, DataError) as error:
        raise DataError(f"checkpoint '{folder}' has no readable manifest: {error}") from error
    if not is_sealed(record):
        raise DataError(f"checkpoint '{folder}' has a manifest that was altered: its checksum is wrong")
    if (wrote := record.get("format")) != _FORMAT:
        raise InputError(f"checkpoint '{folder}' has format {wrote}, this program reads {_FORMAT}: use the release that wrote it")
    try:
        content = json.dumps(record).encode()
        state = _STATE.validate_json(content, strict=True)
        values = _VALUES.validate_json(json.dumps(record["values"]).encode(), strict=True)
        stated = {name: (entry["bytes"], entry["sha256"]) for name, entry in record["files"].items()}
    except (ValidationError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"checkpoint '{folder}' has a manifest with missing or unknown entries") from error
    if {name for name in stated if not STEP_NAME.fullmatch(name)} != _FILES:
        raise DataError(f"the manifest of checkpoint '{folder}' lists other files than {', '.join(sorted(_FILES))}")
    for name, (size, digest) in stated.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size or file_hash(file) != digest:
            raise DataError(f"checkpoint file '{file}' is missing, truncated or altered")
    return state, values


_STATE, _VALUES = TypeAdapter(Checkpoint), TypeAdapter(StateValues)


def pack_state(optimiser: torch.optim.Optimizer, device: torch.device) -> tuple[dict[str, Tensor], StateValues]:
    """State of the optimiser and random generators, bit for bit; with GPU generators if `device` is a GPU."""
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
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}, values


def restore_state(
    tensors: Mapping[str, Tensor], values: StateValues, optimiser: torch.optim.Optimizer, device: torch.device
) -> None:
    """The inverse of `pack_state`; the caller has verified the hash."""
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimiser."):
            _, number, moment = name.split(".")
            moments.setdefault(int(number), {})[moment] = value
    groups = [group | {"betas": tuple(group["betas"])} if "betas" in group else group for group in values.optimiser_groups]
    optimiser.load_state_dict({"state": moments, "param_groups": groups})
    torch.set_rng_state(tensors["random.torch"])
    words = tensors["random.numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, values.numpy_position, values.numpy_has_normal, values.numpy_normal))
    random.setstate((values.python_version, tuple(tensors["random.python"].tolist()), values.python_normal))
    if device.type == "cuda":
        for number in range(torch.cuda.device_count()):
            if (state := tensors.get(f"random.cuda.{number}")) is not None:
                torch.cuda.set_rng_state(state, number)
