"""Lineages of a run: which lineage was forked from which, and after which step.

A run begins in lineage `main`. A run that continues with other settings forks: its steps after the newest checkpoint are
written to `ledger/<name>/`, and `ledger/<name>/lineage.json` records the parent, the last common step, and the changed
settings. The file is published before the first step of the lineage and never changes.

A lineage with another number of start groups per step numbers its own from behind all published ones. So a number always means
the same position.

Rows that the parent used up to the fork count as used; rows that it used later do not. The current lineage of a run is the one
opened last.
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

NO_STEP_LIMIT = 2**31 - 1
"""A larger step number than any run reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The record of a fork."""

    name: str
    number: int
    """1 for a run's first fork, then 2, and so on."""
    parent: str
    """The lineage that it was forked from."""
    after_step: int
    """Last step of the parent that belongs to it."""
    settings_hash: str = ""
    """Hash of the settings of its steps."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Changed settings by dotted name, each [before, after]."""
    first_group: int | None = None
    """Number of the first start group of its first step; None: its parent's numbers go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """Which numbers the start groups of a step have."""

    per_step: int
    after_step: int = 0
    """The step before the first one that is numbered so."""
    first_group: int = 0
    """First number of the step after it."""

    def first_of(self, step: int) -> int:
        """First number of a step; of one up to `after_step`, a number behind all of its."""
        return self.first_group + max(0, step - 1 - self.after_step) * self.per_step

    def step_of(self, number: int) -> int:
        """The step of a start group that is numbered so."""
        return self.after_step + (number - self.first_group) // self.per_step + 1


def lineage_path(paths: RunPaths, name: str) -> Path:
    """Path of the record of a fork."""
    return paths.ledger / check_name(name, "The lineage") / "lineage.json"


def read_lineage(paths: RunPaths, name: str) -> Lineage | None:
    """The record of a fork; None for `main` and for an unknown lineage.

    Raises:
        DataError: the file is damaged.
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
    """The lineage that was opened last, in which the run continues."""
    return max(lineages(paths), key=lambda fork: fork.number).name if lineages(paths) else MAIN


def check_new_lineage(paths: RunPaths, name: str) -> None:
    """Check that a new lineage may have this name. The newest lineage may be opened again before its first step.

    Raises:
        InputError: the name is taken.
    """
    check_name(name, "The lineage")
    begun = name == MAIN or recorded_steps(paths, name)
    if begun or (read_lineage(paths, name) is not None and current_lineage(paths) != name):
        raise InputError(f"run '{paths.root.name}' has a lineage '{name}' already: choose another name for the new one")


def open_lineage(
    paths: RunPaths,
    name: str,
    *,
    parent: str,
    after_step: int,
    settings_hash: str,
    changed: Mapping[str, Any] | None = None,
    first_group: int | None = None,
) -> Lineage:
    """Fork `parent` after a step. To open the same fork again before its first step returns the existing one.

    Raises:
        InputError: there is another lineage of that name.
    """
    check_new_lineage(paths, name)
    opened = read_lineage(paths, name)
    if opened is None:
        fork = Lineage(
            name=name,
            number=len(lineages(paths)) + 1,
            parent=parent,
            after_step=after_step,
            settings_hash=settings_hash,
            changed=dict(changed or {}),
            first_group=first_group,
        )
        FILES.publish(lineage_path(paths, name), lambda aside: aside.write_text(json.dumps(asdict(fork), indent=1)))
        opened = read_lineage(paths, name)
    wanted = (parent, after_step, settings_hash)
    renumbered = opened is not None and first_group not in (None, opened.first_group)
    if opened is None or (opened.parent, opened.after_step, opened.settings_hash) != wanted or renumbered:
        raise InputError(f"run '{paths.root.name}' has a lineage '{name}' for other settings: choose another name for this one")
    return opened


def counts_as_used(paths: RunPaths, name: str, before_step: int | None = None) -> dict[str, int]:
    """Lineages whose ledgers count as used in lineage `name`, each with its last step that counts.

    Args:
        before_step: count only earlier steps; None: all.
    """
    until = NO_STEP_LIMIT if before_step is None else before_step - 1
    counted = {name: until}
    while (fork := read_lineage(paths, name)) is not None and fork.parent not in counted:
        name, until = fork.parent, min(until, fork.after_step)
        counted[name] = until
    return counted


def last_step(paths: RunPaths) -> int:
    """The newest step of the current lineage, recorded or taken over from its parent; 0 if there is none."""
    name = current_lineage(paths)
    fork = read_lineage(paths, name)
    return max([fork.after_step if fork else 0, *recorded_steps(paths, name)])


def lineage_at(paths: RunPaths, step: int, name: str | None = None) -> str:
    """The lineage whose ledger records `step` in the history of `name`: `name` itself, or one that it was forked from.

    Args:
        name: None: the current lineage.
    """
    name = current_lineage(paths) if name is None else name
    while (fork := read_lineage(paths, name)) is not None and step <= fork.after_step:
        name = fork.parent
    return name


def step_numbers(paths: RunPaths, per_step: int) -> StepNumbers:
    """How the training flow numbers the start groups of the current lineage, `per_step` of them in each step."""
    name = current_lineage(paths)
    while (fork := read_lineage(paths, name)) is not None:
        if fork.first_group is not None:
            return StepNumbers(per_step=per_step, after_step=fork.after_step, first_group=fork.first_group)
        name = fork.parent
    return StepNumbers(per_step=per_step)
