"""Checkpoints: the trainer's whole state after a step, whole or absent.

`checkpoints/step_000123/` holds the adapter in peft's layout, the tensors of the optimiser and of every random generator
(`trainer.safetensors`), and a manifest, written last. The manifest says the step and the lineage, holds what is no tensor, names
the size and SHA-256 of each file, and carries a checksum of itself. A folder whose manifest or files do not fit is not a
checkpoint. Nothing in it is a pickle, so reading one runs no code. Folders are written aside, fsynced and renamed, so a kill at
any moment leaves the former state.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes

from storage.files import FILES
from storage.json_files import is_sealed, read_object, sealed
from storage.outcome import Outcome
from storage.runs import RunPaths, publish_directory
from telemetry.errors import DataError, InputError
from training.advantages import MovingMeans
from training.policy import Policy
from training.reference_kl import KlState
from training.state_tensors import StateValues, check_state, pack_state

_FORMAT = 3
_PICKLED_FORMAT, _PICKLE = 2, "trainer.pt"  # of releases whose trainer state was a pickle
_MANIFEST, _TENSORS = "manifest.json", "trainer.safetensors"
_FILES = {"adapter_config.json", "adapter_model.safetensors", _TENSORS}
_NAME = re.compile(r"step_(\d{6,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a checkpoint says beside its tensors."""

    step: int
    """Steps done; the policy version of its adapter."""
    lineage: str
    """Ledger lineage the steps belong to."""
    settings_hash: str
    """Hash of the training settings that made it."""
    skipped_in_a_row: int = 0
    """Updates skipped for non-finite values, just before."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the step reported: a run killed before it could log them logs them when it is resumed."""
    outcome: Outcome | None = None
    """What the step computed, for its replays; None in the checkpoint of a version that did not keep it."""
    kl: KlState = field(default_factory=KlState)
    """Where the weight of the divergence from the base stands."""
    moving: MovingMeans = field(default_factory=MovingMeans)
    """What the steps so far say of returns and advantages."""


def save_checkpoint(paths: RunPaths, state: TrainerState, policy: Policy, optimiser: torch.optim.Optimizer, keep: int) -> Path:
    """Write the checkpoint of `state.step` durably; then drop all but the newest `keep`.

    Raises:
        DataError: a checkpoint of that step exists already.
    """
    final = paths.checkpoint(state.step)
    aside = final.with_name(f".{final.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        _write(aside, state, policy, optimiser)
        publish_directory(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # there only if something failed: a full disk must not stay full of it
    for old in checkpoint_steps(paths)[:-keep]:
        _remove(paths.checkpoint(old))
    return final


def _remove(folder: Path) -> None:
    """Its manifest goes first: what a kill leaves behind is then no checkpoint, rather than a damaged one."""
    manifest = folder / _MANIFEST
    if not manifest.is_dir():
        manifest.unlink()
    shutil.rmtree(folder)


def _write(aside: Path, state: TrainerState, policy: Policy, optimiser: torch.optim.Optimizer) -> None:
    policy.save_adapter(aside)
    (aside / "README.md").unlink(missing_ok=True)
    tensors, values = pack_state(optimiser, policy.device)
    (aside / _TENSORS).write_bytes(tensor_bytes(tensors))  # the writer to a file reports a full disk as an error without a name
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(aside.iterdir())}
    record = {"format": _FORMAT, **asdict(state), "values": asdict(values), "files": files}
    (aside / _MANIFEST).write_text(sealed(record))


def checkpoint_steps(paths: RunPaths) -> list[int]:
    """Steps of the checkpoints that have a manifest, rising."""
    found = (match for name in FILES.folders(paths.checkpoints) if (match := _NAME.fullmatch(name)))
    return sorted({int(match[1]) for match in found if os.path.lexists(paths.checkpoint(int(match[1])) / _MANIFEST)})


def load_checkpoint(
    paths: RunPaths, step: int, policy: Policy, optimiser: torch.optim.Optimizer, *, lineage: str | None = None
) -> TrainerState:
    """Restore policy, optimiser and random generators bitwise from the checkpoint of `step`, or leave them all as they are.

    Args:
        lineage: the one to which the step belongs in this run; None: whichever the checkpoint names.

    Raises:
        DataError: a file of it is missing, cut or altered, or it is the checkpoint of another step or lineage.
        InputError: a release that this one cannot follow wrote it.
    """
    folder = paths.checkpoint(step)
    state, values = _verified(folder)
    if state.step != step or lineage not in (None, state.lineage):
        raise DataError(
            f"checkpoint '{folder}' says that it is of step {state.step} of lineage '{state.lineage}', "
            f"and bears the name of step {step}{f' of lineage {lineage!r}' if lineage else ''}"
        )
    try:
        fitting = check_state(load_tensors((folder / _TENSORS).read_bytes()), values, optimiser)
        policy.load_adapter(folder)
    except (DataError, SafetensorError) as error:
        raise DataError(f"checkpoint '{folder}' does not fit this trainer: {error}") from error
    fitting.restore(optimiser, policy.device)
    return state


def _verified(folder: Path) -> tuple[TrainerState, StateValues]:
    """What the manifest says, once it and all files were found as they were written."""
    try:
        record = read_object(folder / _MANIFEST)
    except (FileNotFoundError, DataError) as error:
        raise DataError(f"checkpoint '{folder}' has no readable manifest: {error}") from error
    _refuse_other_release(folder, record)
    if not is_sealed(record):
        raise DataError(f"checkpoint '{folder}' has a manifest that was altered: its checksum is wrong")
    try:
        content = json.dumps(record).encode()
        state = _STATE.validate_json(content, strict=True)
        values = _VALUES.validate_json(json.dumps(record["values"]).encode(), strict=True)
        stated = {name: (entry["bytes"], entry["sha256"]) for name, entry in record["files"].items()}
    except (ValidationError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"checkpoint '{folder}' has a manifest of other entries than it was written with") from error
    if stated.keys() != _FILES:
        raise DataError(f"checkpoint '{folder}' names other files than {', '.join(sorted(_FILES))}")
    for name, (size, digest) in stated.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size or _sha256(file) != digest:
            raise DataError(f"checkpoint file '{file}' is missing, cut or altered")
    return state, values


_STATE, _VALUES = TypeAdapter(TrainerState), TypeAdapter(StateValues)


def _refuse_other_release(folder: Path, record: dict[str, Any]) -> None:
    """Refuse what is whole but of another layout; damage looks otherwise, and is passed over instead."""
    found, files = record.get("format"), record.get("files")
    if found == _PICKLED_FORMAT and "checksum" not in record and isinstance(files, dict) and _PICKLE in files:
        raise InputError(
            f"checkpoint '{folder}' keeps the trainer's state in a pickle, which could run any code and is not opened: "
            "go on with the release that wrote it, or begin another run"
        )
    if found != _FORMAT and is_sealed(record):
        raise InputError(f"checkpoint '{folder}' has format {found}, this program reads {_FORMAT}: use the release that wrote it")


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
