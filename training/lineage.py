"""In which lineage a trainer goes on: the one of its checkpoint, or one that it opens there for other settings.

Promise: steps made under one set of settings are never continued under another without a lineage of their own.
Never: restore a checkpoint, or write a step.
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
    """A wish to go on under other settings."""

    name: str
    """Of the lineage to open."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Settings by their dotted names, each [before, after]: for the record."""


def choose_lineage(
    paths: RunPaths, state: TrainerState | None, settings_hash: str, storage: StorageSettings, fork: Fork | None
) -> str:
    """The lineage of the steps after ``state``, a whole checkpoint; None: the run has none yet.

    Raises:
        InputError: the settings are not those of the lineage, or the fork cannot be made here.
        DataError: the checkpoint from which the lineage goes on is gone.
    """
    step, parent = (state.step, state.lineage) if state else (0, MAIN)
    ours = _hash(settings_hash, storage)
    if fork is not None:
        if ahead := [version for version in published_versions(paths) if version > step]:
            raise InputError(
                f"run '{paths.root.name}' has published version {ahead[-1]}, but its newest whole checkpoint is of step {step}: "
                "go on with --resume alone until it has caught up, then fork"
            )
        return open_lineage(paths, fork.name, parent=parent, after_step=step, settings_hash=ours, changed=fork.changed).name
    name = current_lineage(paths)
    if state is not None and state.lineage == name:
        if state.settings_hash != settings_hash:
            raise InputError(
                f"checkpoint '{paths.checkpoint(step)}' was made under other training settings than are given now: "
                "resume with the run's own, fork them off with --fork-lineage NAME, or begin another run"
            )
        return name
    standing = read_lineage(paths, name)
    if standing is None and state is None:
        return name
    if standing is None or (standing.parent, standing.after_step) != (parent, step):
        where = f"step {standing.after_step} of lineage '{standing.parent}'" if standing else "another lineage"
        raise DataError(
            f"lineage '{name}' of run '{paths.root.name}' goes on from {where}, whose checkpoint is gone: restore it from a copy"
        )
    if standing.settings_hash != ours:
        raise InputError(
            f"lineage '{name}' of run '{paths.root.name}' was opened for other settings than are given now: "
            f"give those with --resume, or open one for these with --fork-lineage NAME"
        )
    return name


def _hash(settings_hash: str, storage: StorageSettings) -> str:
    """Of all settings that make a step what it is; a setting that came later and is at its default leaves it as it was."""
    chosen = storage.model_dump_json(exclude_defaults=True)
    return hashlib.sha256(f"{settings_hash} {chosen}".encode()).hexdigest()[:16]
