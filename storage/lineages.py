"""Lineages of a run: where its steps were forked from, so that settings may change without two histories becoming one.

A run begins in lineage ``main``. A run that goes on under other settings forks: its steps after the newest checkpoint are written
to ``ledger/<name>/``, and ``ledger/<name>/lineage.json`` says what it was forked from, after which step, and why.

Promise: the record is published once and never changed, before the lineage's first step. What the parent used up to the fork
counts as used, and what it recorded after that does not: those rows are free again. The lineage that was opened last is the one
that a run goes on in.
Never: decide whether settings may change, or touch a checkpoint.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from storage.files import FILES
from storage.json_files import read_object
from storage.ledger import MAIN, recorded_steps
from storage.runs import RunPaths, check_name
from telemetry.errors import DataError, InputError

EVER = 2**31 - 1
"""A step that no run reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A fork."""

    name: str
    number: int
    """Forks of the run before it, and one."""
    parent: str
    """The lineage that it goes on from."""
    after_step: int
    """The parent's last step that belongs to it."""
    settings_hash: str = ""
    """Of the settings that its steps are made under."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Settings by their dotted names, each [before, after]."""


def lineage_path(paths: RunPaths, name: str) -> Path:
    """Where the record of a fork lies or will lie."""
    return paths.ledger / check_name(name, "The lineage") / "lineage.json"


def read_lineage(paths: RunPaths, name: str) -> Lineage | None:
    """The record of a fork; None for ``main`` and for what nobody opened.

    Raises:
        DataError: it was altered: nobody could say what counts as used.
    """
    path = lineage_path(paths, name)
    if not FILES.exists(path):
        return None
    try:
        found = Lineage(**read_object(path))
    except (DataError, TypeError) as error:
        raise DataError(
            f"{path} does not say what lineage '{name}' was forked from ({error}); restore it from a copy."
        ) from error
    if found.name != name:
        raise DataError(f"{path} is of lineage '{found.name}', so its folder is a copy or was renamed; restore the run's own.")
    return found


def lineages(paths: RunPaths) -> list[Lineage]:
    """All forks, in the order in which they were opened."""
    found = (read_lineage(paths, name) for name in FILES.folders(paths.ledger))
    return sorted((fork for fork in found if fork is not None), key=lambda fork: fork.number)


def current_lineage(paths: RunPaths) -> str:
    """The lineage in which a run goes on: the one that was opened last."""
    return max(lineages(paths), key=lambda fork: fork.number).name if lineages(paths) else MAIN


def check_new_lineage(paths: RunPaths, name: str) -> None:
    """Refuse a name that a lineage has already, but for the newest one before its first step, which may be opened again.

    Raises:
        InputError: another name is needed.
    """
    check_name(name, "The lineage")
    begun = name == MAIN or recorded_steps(paths, name)
    if begun or (read_lineage(paths, name) is not None and current_lineage(paths) != name):
        raise InputError(f"run '{paths.root.name}' has a lineage '{name}' already: choose another name for the new one")


def open_lineage(
    paths: RunPaths, name: str, *, parent: str, after_step: int, settings_hash: str, changed: Mapping[str, Any] | None = None
) -> Lineage:
    """Fork ``parent`` after a step; the same fork again, before it has a step, is the one that stands.

    Raises:
        InputError: there is another lineage of that name.
    """
    check_new_lineage(paths, name)
    standing = read_lineage(paths, name)
    if standing is None:
        fork = Lineage(
            name=name,
            number=len(lineages(paths)) + 1,
            parent=parent,
            after_step=after_step,
            settings_hash=settings_hash,
            changed=dict(changed or {}),
        )
        FILES.publish(lineage_path(paths, name), lambda aside: aside.write_text(json.dumps(asdict(fork), indent=1)))
        standing = read_lineage(paths, name)
    same = (parent, after_step, settings_hash)
    if standing is None or (standing.parent, standing.after_step, standing.settings_hash) != same:
        raise InputError(f"run '{paths.root.name}' has a lineage '{name}' for other settings: choose another name for this one")
    return standing


def counts_as_used(paths: RunPaths, name: str, before_step: int | None = None) -> dict[str, int]:
    """Lineages whose ledgers say what ``name`` has used, each with its last step that counts.

    Args:
        before_step: count only what was used before that step.
    """
    until = EVER if before_step is None else before_step - 1
    counted = {name: until}
    while (fork := read_lineage(paths, name)) is not None and fork.parent not in counted:
        name, until = fork.parent, min(until, fork.after_step)
        counted[name] = until
    return counted


def last_step(paths: RunPaths) -> int:
    """The newest step that the lineage in which a run goes on has recorded, or takes over from its parent; 0 if there is none."""
    name = current_lineage(paths)
    fork = read_lineage(paths, name)
    return max([fork.after_step if fork else 0, *recorded_steps(paths, name)])


def lineage_at(paths: RunPaths, step: int, name: str | None = None) -> str:
    """The lineage to which a step of ``name``, by default the current one, belongs: itself, or one that it was forked from."""
    name = current_lineage(paths) if name is None else name
    while (fork := read_lineage(paths, name)) is not None and step <= fork.after_step:
        name = fork.parent
    return name
