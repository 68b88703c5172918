"""Lists the runs in a folder, from a few small files of each.

A damaged run is listed with the reason, and a folder that is no run is left out. Rows are never opened, so a hundred runs take a
second or two. Nothing is written.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evaluation.score_files import read_score
from reports.read_run import read_progress
from storage.retention import size_of
from storage.runs import RunPaths, last_written, refresh_run, run_names
from telemetry.errors import EntenteError, InputError

State = Literal["training", "complete", "interrupted", "damaged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """One run."""

    name: str
    state: State
    """"training": a process of this machine holds its lock; "complete": all its steps are done and scored."""
    done: int = 0
    planned: int = 0
    """Planned steps."""
    base_score: float | None = None
    trained_score: float | None = None
    """Centres gained per game year against the first kind of opponents; None if not measured."""
    decisions: int = 0
    """Rows that its finished steps played."""
    size: int
    """Bytes of all its files."""
    written: float
    """Time of its last start, resume or metric, in seconds since 1970."""
    trouble: str = ""
    """Reason if it is damaged; else empty."""


def list_runs(runs_root: Path) -> list[RunLine]:
    """The runs under `runs_root`; the latest one is last.

    Raises:
        InputError: there is no such folder.
    """
    if not runs_root.is_dir():
        raise InputError(f"there is no folder '{runs_root}': name the folder of your runs with --runs-root")
    found = [RunPaths(runs_root / name) for name in run_names(runs_root)]
    for paths in found:
        refresh_run(paths)
    lines = [_line(paths) for paths in found if _is_run(paths)]
    return sorted(lines, key=lambda line: (line.written, line.name))


def _is_run(paths: RunPaths) -> bool:
    """Whether the folder has a run's settings or other files of a run."""
    return paths.settings.is_file() or (paths.shards.is_dir() and paths.ledger.is_dir())


def _line(paths: RunPaths) -> RunLine:
    name, size = paths.root.name, size_of(paths.root)
    if not paths.settings.is_file():
        written = paths.root.stat().st_mtime
        return RunLine(name=name, state="damaged", size=size, written=written, trouble="it has no settings.json")
    written = last_written(paths)
    try:
        progress = read_progress(paths)
        summary: dict[str, Any] = json.loads(paths.summary.read_bytes()) if paths.summary.is_file() else {}
        base, trained = (_score(paths, summary, label) for label in ("base", "trained"))
        return RunLine(
            name=name,
            state="training" if progress.at_work else "complete" if progress.is_over else "interrupted",
            done=max(progress.steps, default=0),
            planned=progress.planned,
            base_score=base,
            trained_score=trained,
            decisions=int(sum(figures.get("rollout/decisions", 0) for figures in progress.steps.values())),
            size=size,
            written=written,
        )
    except (EntenteError, OSError, ValueError, TypeError, AttributeError) as error:
        trouble = str(error) if isinstance(error, EntenteError) else f"its files cannot be read: {type(error).__name__}: {error}"
        return RunLine(name=name, state="damaged", size=size, written=written, trouble=trouble)


def _score(paths: RunPaths, summary: dict[str, Any], label: str) -> float | None:
    """The score from the run's summary, else from its score file."""
    if (value := summary.get(f"{label}_score")) is not None:
        return float(value)
    record = read_score(paths, label)
    return None if record is None else record.score.mean
