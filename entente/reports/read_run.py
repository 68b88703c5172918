"""Reads the small files of a run in any state: settings, step metrics, summary, alerts and lock. Opens no rows, writes nothing.

If a step was logged twice, the last record counts. `troubles` lists what cannot be read; `run_facts.py` reads the rest."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import BaseModel

from entente.evaluation.score_files import read_score
from entente.records.policy_version import BASE_VERSION
from entente.telemetry.errors import EntenteError, InputError
from storage.files import is_held
from storage.retention import size_of
from storage.runs import RunPaths, last_change, last_written, run_names

_OF_EVERY_RUN = ("run", "runs_root")  # different in every run, so not compared


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    name: str
    settings: Mapping[str, Any]
    """The resolved tree, as stored."""
    steps: Mapping[int, Mapping[str, float]]
    """Registered metrics per finished step."""
    mismatch: Mapping[str, float]
    """Metrics of the mismatch probe before the first step; empty without one."""
    summary: Mapping[str, Any] | None
    """Written at the end of the run; None until then."""
    environment: Mapping[str, str] | None
    alerts: list[str]
    at_work: bool
    """True if a process on this machine holds the lock."""
    quiet_s: float
    """Seconds since the last file."""
    troubles: list[str]

    @property
    def planned(self) -> int:
        return int(self.settings["steps"])

    @property
    def done(self) -> int:
        return max([self.planned if self.is_over else 0, *self.steps])

    @property
    def is_over(self) -> bool:
        """True if it has a summary of all planned steps; a kill may have lost the metrics of a step."""
        return self.summary is not None and self.summary.get("steps", 0) >= self.planned

    @property
    def decisions(self) -> int:
        """Decisions rolled out, without probes. A step whose metrics a kill lost is counted by the summary alone."""
        stored = self.summary.get("decisions", 0) if self.is_over and self.summary is not None else 0
        return max(int(stored), int(self.total("rollout/decisions")))

    def series(self, name: str) -> list[float]:
        """Over steps 1 to `done`; NaN if a step lacks it."""
        return [self.steps.get(step, {}).get(name, float("nan")) for step in range(1, self.done + 1)]

    def total(self, name: str) -> float:
        return sum(figures.get(name, 0.0) for figures in self.steps.values())

    def middle(self, name: str) -> float:
        """Median over the steps that have it; NaN if none has."""
        values = [figures[name] for figures in self.steps.values() if name in figures]
        return median(values) if values else float("nan")

    def share(self, part: str, whole: str) -> float:
        return self.total(part) / self.total(whole) if self.total(whole) else float("nan")


def read_run(paths: RunPaths, metrics: "MetricsFile | None" = None) -> RecordedRun:
    """`metrics`: what an earlier call has read of them; None: read all."""
    settings, troubles = read_settings(paths), list[str]()
    if unknown := _unknown_settings(settings):
        troubles.append(
            f"The run is of another version of Entente, whose settings {', '.join(unknown)} this one does not have: figures that "
            "were renamed since are missing here."
        )
    records = (metrics or MetricsFile(paths.metrics)).read(troubles)
    return RecordedRun(
        name=paths.root.name,
        settings=settings,
        steps={step: figures for step, figures in sorted(records.items()) if "time/step_s" in figures},
        mismatch={name: value for name, value in records.get(0, {}).items() if name.startswith("mismatch/")},
        summary=_json(paths.summary, troubles),
        environment=_json(paths.environment, troubles),
        alerts=_alerts(paths.alerts),
        at_work=is_held(paths.lock),
        quiet_s=time.time() - last_change(paths),
        troubles=troubles,
    )


def read_settings(paths: RunPaths) -> dict[str, Any]:
    if not paths.settings.is_file():
        raise InputError(f"there is no run in '{paths.root}': it has no settings.json")
    try:
        settings = json.loads(paths.settings.read_bytes())
        if not isinstance(settings, dict) or not isinstance(settings["steps"], int):
            raise ValueError("its steps are no number")
    except (ValueError, KeyError) as error:
        raise InputError(f"'{paths.settings}' is no complete record of settings ({error}): restore it from a copy") from error
    return settings


def _unknown_settings(settings: Mapping[str, Any]) -> list[str]:
    """Dotted names in a run's record that are no settings of this version."""
    from entente.settings.run_settings import RunSettings

    def among(values: Mapping[str, Any], known: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, value in values.items():
            kind = known.model_fields[name].annotation if name in known.model_fields else None
            if name not in known.model_fields:
                yield f"{prefix}{name}"
            elif isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from among(value, kind, f"{prefix}{name}.")

    return list(among(settings, RunSettings, ""))


class MetricsFile:
    """A run's metrics. Each `read` parses only the lines that came since the last one, unless the file was replaced."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._forget(-1)

    def _forget(self, inode: int) -> None:
        self._inode, self._end, self._lines = inode, 0, 0
        self._newest = b""
        self._records: dict[int, dict[str, float]] = {}
        self._cut: list[int] = []

    def read(self, troubles: list[str]) -> dict[int, dict[str, float]]:
        """Figures by step; adds a sentence about lines that are no records."""
        rest = b""
        if self._file.is_file():
            with self._file.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(self._end - len(self._newest))
                # A file system gives the inode of a removed file to the next one, and a copy may keep that of the file before.
                if inode != self._inode or file.read(len(self._newest)) != self._newest:
                    self._forget(inode)
                file.seek(self._end)
                whole, newline, rest = file.read().rpartition(b"\n")
            self._end += len(whole) + len(newline)
            self._newest = whole.rpartition(b"\n")[2] + newline or self._newest
            for line in whole.split(b"\n") if newline else ():
                self._lines += 1
                if not _record(line, self._records):
                    self._cut.append(self._lines)
        elif self._inode >= 0:
            self._forget(-1)
        records, last = dict(self._records), self._lines + bool(rest)
        cut = self._cut + ([last] if rest and not _record(rest, records) else [])
        if cut:
            which = "its last line is" if cut == [last] else f"line {', '.join(map(str, cut))} of {last} is"
            troubles.append(f"{self._file.name}: {which} no complete record and was skipped.")
        return records


def _record(line: bytes, records: dict[int, dict[str, float]]) -> bool:
    """Add a line's record; False if it is none."""
    try:
        record = json.loads(line)
        records[int(record["step"])] = {name: value for name, value in record.items() if "/" in name}
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _json(file: Path, troubles: list[str]) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_bytes())
    except ValueError:
        troubles.append(f"{file.name} is not a complete JSON document and was skipped.")
        return None


def _alerts(file: Path) -> list[str]:
    sentences = []
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            alert = json.loads(line)
            sentences.append(f"alert ({alert['name']}): {alert['sentence']}")
        except (ValueError, KeyError, TypeError):
            continue
    return sentences


# -- the list of runs ------------------------------------------------------------------------------------------------------

State = Literal["training", "complete", "interrupted", "damaged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    name: str
    state: State
    """"training": a process of this machine holds its lock; "complete": all its steps are done and scored."""
    done: int = 0
    planned: int = 0
    base_score: float | None = None
    trained_score: float | None = None
    """Centres gained over `evaluation.horizon_years` against the first kind of opponents; None if not measured."""
    newest_return: float | None = None
    """Mean return of the rows of the newest step that trained on any."""
    decisions: int = 0
    size: int
    """Bytes of all its files."""
    written: float
    """Last start, resume or metric, unix time."""
    trouble: str = ""
    """Reason if it is damaged; else empty."""


def list_runs(runs_root: Path) -> list[RunLine]:
    """Latest last. Skips folders that are no runs; a damaged run has its reason."""
    if not runs_root.is_dir():
        raise InputError(f"there is no folder '{runs_root}': name the folder of your runs with --runs-root")
    lines = [line for name in run_names(runs_root) if (line := run_line(RunPaths(runs_root / name))) is not None]
    return sorted(lines, key=lambda line: (line.written, line.name))


def run_line(paths: RunPaths, metrics: MetricsFile | None = None) -> RunLine | None:
    """None if the folder is no run. `metrics`: what an earlier call has read of them."""
    if not paths.settings.is_file() and not (paths.ledger.is_dir() and any(paths.ledger.iterdir())):
        return None
    name, size = paths.root.name, size_of(paths.root.resolve())  # a run may be a link to another disk
    if not paths.settings.is_file():
        written = paths.root.stat().st_mtime
        return RunLine(name=name, state="damaged", size=size, written=written, trouble="it has no settings.json")
    written = last_written(paths)
    try:
        run = read_run(paths, metrics)
        base = _score(paths, run.summary or {}, "base", BASE_VERSION)
        trained = _score(paths, run.summary or {}, "trained", run.planned)
        return RunLine(
            name=name,
            state="training" if run.at_work else "complete" if run.is_over else "interrupted",
            done=run.done,
            planned=run.planned,
            base_score=base,
            trained_score=trained,
            newest_return=next(
                (each["train/reward"] for each in reversed([*run.steps.values()]) if "train/reward" in each), None
            ),
            decisions=run.decisions,
            size=size,
            written=written,
        )
    except (EntenteError, OSError, ValueError, TypeError, AttributeError) as error:
        trouble = str(error) if isinstance(error, EntenteError) else f"its files cannot be read: {type(error).__name__}: {error}"
        return RunLine(name=name, state="damaged", size=size, written=written, trouble=trouble)


def _score(paths: RunPaths, summary: Mapping[str, Any], label: str, version: int) -> float | None:
    """None also if the score is of another version: a run that goes on was scored when it had fewer steps."""
    if (value := summary.get(f"{label}_score")) is not None:
        return float(value)
    record = read_score(paths, label)
    return record.score.mean if record is not None and record.policy_version == version else None


# -- settings by name ------------------------------------------------------------------------------------------------------


def different(trees: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Dotted names whose values differ: (name, values); None where a tree lacks the name."""
    names = dict.fromkeys(name for tree in trees.values() for name in tree if name not in _OF_EVERY_RUN)
    rows = [(name, [tree.get(name) for tree in trees.values()]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]


def value_text(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "(empty)" if value == "" else str(value).lower() if isinstance(value, bool) else str(value)
