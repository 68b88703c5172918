"""Checkpoints: the trainer's whole state after a step.

`checkpoints/step_000123/` holds the adapter in peft's layout, the tensors of the optimiser and
of every random generator (`trainer.safetensors`), copies of the newest ledgers, and a manifest, written last. The manifest holds
the step, the values that are not tensors, the size and SHA-256 of each file, and a checksum of itself. A folder
whose manifest or files do not match is not a checkpoint. No file is a pickle, so reading a checkpoint runs no code. A folder is
written under another name, fsynced and renamed, so a checkpoint is complete or absent after a kill.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes

from entente.telemetry.errors import DataError, InputError
from entente.training.policy import Policy
from entente.training.state_tensors import StateValues, pack_state, restore_state
from storage.files import publish_directory, remove_folder
from storage.json_files import is_sealed, read_object, sealed
from storage.ledger import STEP_NAME
from storage.ledger_copies import CHECKPOINT_MANIFEST, checkpoint_steps
from storage.outcome import Outcome
from storage.runs import RunPaths

_FORMAT = 3
_TENSORS = "trainer.safetensors"
_FILES = {"adapter_config.json", "adapter_model.safetensors", _TENSORS}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The content of a checkpoint beside its tensors."""

    step: int
    """Steps done; the policy version of its adapter."""
    settings_hash: str
    """Hash of the training settings of the step."""
    skipped_in_a_row: int = 0
    """Updates skipped in a row so far, because they were not finite."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the step. If the run was killed before it logged them, the resumed run logs them."""
    outcome: Outcome | None = None
    """Outcome of the step, for replays; None in checkpoints of early releases."""


def save_checkpoint(
    paths: RunPaths,
    state: TrainerState,
    policy: Policy,
    optimiser: torch.optim.Optimizer,
    keep: int,
    ledgers: Sequence[Path] = (),
) -> Path:
    """Write the checkpoint of `state.step` durably, with copies of `ledgers`, then remove all but the newest `keep`.

    Raises:
        DataError: a checkpoint of that step exists already.
    """
    final = paths.checkpoint(state.step)
    aside = final.with_name(f".{final.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        for ledger in ledgers:
            shutil.copyfile(ledger, aside / ledger.name)
        _write(aside, state, policy, optimiser)
        publish_directory(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # exists only after a failure; it would keep a full disk full
    for old in checkpoint_steps(paths)[:-keep]:
        remove_folder(paths.checkpoint(old))
    return final


def _write(aside: Path, state: TrainerState, policy: Policy, optimiser: torch.optim.Optimizer) -> None:
    policy.save_adapter(aside)
    (aside / "README.md").unlink(missing_ok=True)
    tensors, values = pack_state(optimiser, policy.device)
    (aside / _TENSORS).write_bytes(tensor_bytes(tensors))  # not save_file, which reports a full disk without an errno
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(aside.iterdir())}
    record = {"format": _FORMAT, **asdict(state), "values": asdict(values), "files": files}
    (aside / CHECKPOINT_MANIFEST).write_text(sealed(record))


def load_checkpoint(paths: RunPaths, step: int, policy: Policy, optimiser: torch.optim.Optimizer) -> TrainerState:
    """Restore policy, optimiser and random generators bitwise from the checkpoint of `step`. On an error nothing is changed.

    Raises:
        DataError: a file is missing, truncated or altered, or the checkpoint is of another step.
        InputError: a release with another checkpoint format wrote it.
    """
    folder = paths.checkpoint(step)
    state, values = _verified(folder)
    if state.step != step:
        raise DataError(f"checkpoint '{folder}' is of step {state.step}, but its place is that of step {step}")
    try:
        tensors = load_tensors((folder / _TENSORS).read_bytes())
        policy.load_adapter(folder)
    except (DataError, SafetensorError) as error:
        raise DataError(f"checkpoint '{folder}' does not fit this trainer: {error}") from error
    restore_state(tensors, values, optimiser, policy.device)
    return state


def _verified(folder: Path) -> tuple[TrainerState, StateValues]:
    """The manifest's content, after the checksums of the manifest and of all files were verified."""
    try:
        record = read_object(folder / CHECKPOINT_MANIFEST)
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
        raise DataError(f"checkpoint '{folder}' has a manifest with missing or unknown entries") from error
    if {name for name in stated if not STEP_NAME.fullmatch(name)} != _FILES:
        raise DataError(f"the manifest of checkpoint '{folder}' lists other files than {', '.join(sorted(_FILES))}")
    for name, (size, digest) in stated.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != size or _sha256(file) != digest:
            raise DataError(f"checkpoint file '{file}' is missing, truncated or altered")
    return state, values


_STATE, _VALUES = TypeAdapter(TrainerState), TypeAdapter(StateValues)


def _refuse_other_release(folder: Path, record: dict[str, Any]) -> None:
    """Refuse an intact checkpoint of another format. A damaged one is not refused here: the caller skips it."""
    found = record.get("format")
    if found != _FORMAT and is_sealed(record):
        raise InputError(f"checkpoint '{folder}' has format {found}, this program reads {_FORMAT}: use the release that wrote it")


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
