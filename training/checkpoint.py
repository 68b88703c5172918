"""Checkpoints: the trainer's whole state after a step, whole or absent.

`checkpoints/step_000123/` holds the adapter in peft's layout, the optimiser and every random generator, and a manifest, written
last, with the size and SHA-256 of each file; a folder without a manifest that fits is not a checkpoint. Folders are
written aside,
fsynced and renamed, so a kill at any moment leaves the former state.
"""

import hashlib
import json
import random
import shutil
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.outcome import Outcome, outcome_from
from storage.runs import RunPaths, publish_directory
from telemetry.errors import DataError
from training.advantages import MovingFigures
from training.policy import Policy
from training.reference_kl import KlController

_FORMAT = 2


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
    kl: KlController = field(default_factory=KlController)
    """Where the weight of the divergence from the base stands."""
    moving: MovingFigures = field(default_factory=MovingFigures)
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
        # Its manifest first: what a kill leaves behind is then no checkpoint, rather than a damaged one.
        (paths.checkpoint(old) / "manifest.json").unlink()
        shutil.rmtree(paths.checkpoint(old))
    return final


def _write(aside: Path, state: TrainerState, policy: Policy, optimiser: torch.optim.Optimizer) -> None:
    policy.save_adapter(aside)
    (aside / "README.md").unlink(missing_ok=True)
    random_state = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if policy.device.type == "cuda":
        random_state["cuda"] = torch.cuda.get_rng_state_all()
    packed = BytesIO()  # torch's own writer reports a full disk as an error without a name
    torch.save({"optimiser": optimiser.state_dict(), "random": random_state}, packed)
    (aside / "trainer.pt").write_bytes(packed.getbuffer())
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(aside.iterdir())}
    record = {
        "format": _FORMAT,
        "step": state.step,
        "lineage": state.lineage,
        "settings_hash": state.settings_hash,
        "skipped_in_a_row": state.skipped_in_a_row,
        "metrics": state.metrics,
        "outcome": None if state.outcome is None else asdict(state.outcome),
        # As JSON, which gives every float64 back bit for bit.
        "kl": asdict(state.kl),
        "moving": asdict(state.moving),
        "files": files,
    }
    (aside / "manifest.json").write_text(json.dumps(record, indent=1))


def checkpoint_steps(paths: RunPaths) -> list[int]:
    """Steps of the checkpoints that have a manifest, rising."""
    found = paths.checkpoints.glob("step_*/manifest.json")
    return sorted(int(manifest.parent.name.removeprefix("step_")) for manifest in found)


def load_checkpoint(paths: RunPaths, step: int, policy: Policy, optimiser: torch.optim.Optimizer) -> TrainerState:
    """Restore policy, optimiser and random generators bitwise from the checkpoint of `step`.

    Raises:
        DataError: a file of it is missing, cut or altered.
    """
    folder = paths.checkpoint(step)
    record = _verified(folder)
    policy.load_adapter(folder)
    saved = torch.load(folder / "trainer.pt", weights_only=False, map_location=policy.device)
    optimiser.load_state_dict(saved["optimiser"])
    torch.set_rng_state(saved["random"]["torch"].cpu())
    np.random.set_state(saved["random"]["numpy"])
    random.setstate(saved["random"]["python"])
    if "cuda" in saved["random"]:
        torch.cuda.set_rng_state_all([state.cpu() for state in saved["random"]["cuda"]])
    return TrainerState(
        step=record["step"],
        lineage=record["lineage"],
        settings_hash=record["settings_hash"],
        skipped_in_a_row=record["skipped_in_a_row"],
        metrics=record["metrics"],
        outcome=outcome_from(record["outcome"]) if record.get("outcome") else None,
        kl=KlController(**record.get("kl", {})),
        moving=MovingFigures(**record.get("moving", {})),
    )


def _verified(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"checkpoint '{folder}' has no readable manifest: {error}") from error
    if record.get("format") != _FORMAT:
        raise DataError(f"checkpoint '{folder}' has format {record.get('format')}, this program reads {_FORMAT}")
    for name, stated in record["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != stated["bytes"] or _sha256(file) != stated["sha256"]:
            raise DataError(f"checkpoint file '{file}' is missing, cut or altered")
    return record


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
