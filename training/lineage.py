"""Chooses the lineage in which a trainer continues: that of its checkpoint, or a new one for other settings.

Steps made under one set of settings are continued under other settings only in a new lineage.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from storage.adapters import published_versions
from storage.ledger import MAIN
from storage.lineages import current_lineage, open_lineage, read_lineage
from storage.runs import RunPaths
from storage.settings import StorageSettings
from telemetry.errors import DataError, InputError
from training.checkpoint import TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A request to continue under other settings."""

    name: str
    """Name of the lineage to open."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Changed settings by dotted name, each [before, after]; recorded with the lineage."""
    first_group: int | None = None
    """As in `Lineage`."""


def choose_lineage(
    paths: RunPaths, state: TrainerState | None, settings_hash: str, storage: StorageSettings, fork: Fork | None
) -> str:
    """The lineage of the next steps.

    Args:
        state: state of the newest whole checkpoint; None if the run has none yet.
        settings_hash: hash of the training settings given now.
        fork: opens a new lineage; None to continue in the current one.

    Raises:
        InputError: the settings are not those of the lineage, or the lineage cannot be opened after this step.
        DataError: the checkpoint from which the lineage continues is gone.
    """
    step, parent = (state.step, state.lineage) if state else (0, MAIN)
    full_hash = _hash_with_storage(settings_hash, storage)
    if fork is not None:
        if ahead := [version for version in published_versions(paths) if version > step]:
            raise InputError(
                f"run '{paths.root.name}' has published version {ahead[-1]}, but its newest whole checkpoint is of step {step}: "
                "go on with --resume alone until it has caught up, then fork"
            )
        return open_lineage(
            paths,
            fork.name,
            parent=parent,
            after_step=step,
            settings_hash=full_hash,
            changed=fork.changed,
            first_group=fork.first_group,
        ).name
    name = current_lineage(paths)
    if state is not None and state.lineage == name:
        if state.settings_hash != settings_hash:
            raise InputError(
                f"checkpoint '{paths.checkpoint(step)}' was made under other training settings than are given now: "
                "resume with the run's own settings, open a lineage for these with --fork-lineage NAME, or begin another run"
            )
        return name
    opened = read_lineage(paths, name)
    if opened is None and state is None:
        return name
    if opened is None or (opened.parent, opened.after_step) != (parent, step):
        where = f"step {opened.after_step} of lineage '{opened.parent}'" if opened else "another lineage"
        raise DataError(
            f"lineage '{name}' of run '{paths.root.name}' goes on from {where}, whose checkpoint is gone: restore it from a copy"
        )
    if opened.settings_hash != full_hash:
        raise InputError(
            f"lineage '{name}' of run '{paths.root.name}' was opened for other settings than are given now: "
            f"give those with --resume, or open one for these with --fork-lineage NAME"
        )
    return name


def _hash_with_storage(settings_hash: str, storage: StorageSettings) -> str:
    """Hash of the training and storage settings. Storage settings at their defaults are excluded, so that a new setting does not
    change it."""
    chosen = storage.model_dump_json(exclude_defaults=True)
    return hashlib.sha256(f"{settings_hash} {chosen}".encode()).hexdigest()[:16]
