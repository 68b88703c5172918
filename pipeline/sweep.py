"""A sweep: runs that differ in some settings and in their seed, under one folder of runs.

    runs/_sweeps/<name>.json    the sweep, its runs, and the score of each run after each rung
    runs/<name>-<n>/            the runs, counted from 1: all seeds of the first setting, then those of the second ...

A *setting* of a sweep, or point, is one choice of values for the settings that it varies. A *rung* is a number of steps after
which a search by halving keeps the best third of the settings; other searches have one rung, the end of each run. The file is the
truth: settings that were drawn are read from it, never drawn again. This module starts nothing.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from evaluation.score_files import read_scores, write_score
from pipeline.run_settings import RunSettings, layered_settings, one_sentence
from pipeline.setting_names import setting_names, similar_names
from pipeline.settings_file import read_settings_file
from pipeline.sweep_search import (
    RANDOM_FIRST,
    Point,
    Range,
    Search,
    Values,
    combinations,
    draw,
    each_value,
    every_combination,
    survivors,
)
from records.policy_version import BASE_VERSION
from storage.files import FILES, make_directory
from storage.json_files import read_object
from storage.runs import RunPaths, check_run_name, durable_write
from telemetry.errors import DataError, InputError

SWEEP_FOLDER = "_sweeps"
"""Folder beside the runs."""
_MOST_RUNS = 1000
"""Runs of a sweep at most: each takes minutes, so more are a mistake."""
_OWN = {"run": "name", "runs_root": "--runs-root", "seed": "seeds"}


class Sweep(BaseModel):
    """What a sweep's file says."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, title="Sweep")

    name: str
    """Name of the sweep, and beginning of its runs' names."""
    preset: str = "laptop"
    """Preset of all runs."""
    config: tuple[str, ...] = ()
    """TOML files laid over the preset; later ones win."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    """Seeds with which each setting is trained."""
    search: Search = "grid"
    """'grid': every combination of values; 'random': `samples` of them; 'halving': all, or `samples`, and after each rung the
    best third goes on; 'tpe': `samples`, each chosen by the scores of those before it."""
    samples: Annotated[int, Field(ge=0)] = 0
    """Combinations that are drawn without repetition; 0: all."""
    search_seed: int = 0
    """Seed of the draws."""
    rungs: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field()] = ()
    """Steps after which 'halving' drops settings; the last one ends the sweep."""
    settings: Annotated[dict[str, Values], Field(min_length=1)]
    """Dotted name of a setting -> its values: a list, or {"low": 1e-5, "high": 1e-3, "log": true}."""

    @field_validator("settings", mode="before")
    @classmethod
    def _flat(cls, tree: Any) -> Any:
        return dict(_leaves(tree)) if isinstance(tree, Mapping) else tree

    @model_validator(mode="after")
    def _check(self) -> "Sweep":
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {list(self.seeds)} name one twice: leave it out")
        known = tuple(setting_names(RunSettings))
        for name, values in self.settings.items():
            if name in _OWN:
                raise ValueError(f"settings cannot vary {name}: a sweep has {_OWN[name]} for it")
            if name not in known:
                meant = " or ".join(similar_names(name, known))
                raise ValueError(f"there is no setting '{name}'" + (f"; did you mean {meant}?" if meant else ""))
            if not isinstance(values, Range) and not values:
                raise ValueError(f"settings.{name} has no values: give at least one")
            if isinstance(values, Range):
                if not self.samples:
                    raise ValueError(
                        f"settings.{name} is a range: give samples, with search 'random', 'tpe' or 'halving', or a list of values"
                    )
            elif any(value in values[:place] for place, value in enumerate(values)):
                raise ValueError(f"settings.{name} {values} names a value twice: leave it out")
        if (self.search in ("random", "tpe")) > bool(self.samples) or (self.search == "grid" and self.samples):
            raise ValueError(
                f"search '{self.search}' with samples {self.samples}: 'random' and 'tpe' take samples, 'grid' takes none"
            )
        if self.search == "tpe" and self.samples <= RANDOM_FIRST:
            raise ValueError(
                f"search 'tpe' with samples {self.samples}: it draws its first {RANDOM_FIRST} at random, so give more, or search "
                "'random'"
            )
        if self.samples > self.combinations:
            raise ValueError(f"samples {self.samples} exceeds the {self.combinations} combinations of settings: lower it")
        if (self.search == "halving") != bool(self.rungs) or list(self.rungs) != sorted(set(self.rungs)):
            raise ValueError(
                f"search '{self.search}' with rungs {list(self.rungs)}: 'halving' alone takes rungs, in rising order"
            )
        if self.rungs and "steps" in self.settings:
            raise ValueError("settings cannot vary steps in a search by 'halving': its rungs are steps")
        if self.run_count > _MOST_RUNS:
            raise ValueError(
                f"the sweep has {self.run_count} runs, and at most {_MOST_RUNS} are allowed: give fewer values or seeds"
            )
        return self

    @property
    def combinations(self) -> float:
        """Combinations of all values; infinite with a range that has no steps."""
        return combinations(self.settings)

    @property
    def run_count(self) -> int:
        """Runs of the whole sweep."""
        return len(self.seeds) * (self.samples or int(self.combinations))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One run of a sweep."""

    point: int
    """Place of its setting among `SweepState.points`."""
    settings: RunSettings
    """All settings of the run, with its name and seed."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.settings.run

    @property
    def base_question(self) -> str:
        """What the scores of the base depend on. Runs with equal ones share them."""
        chosen = self.settings.model_dump(mode="json", include={"inference", "tiny_model", "prompts", "cache"})
        return json.dumps([chosen, self.settings.evaluation.question.model_dump(mode="json")], sort_keys=True)


def read_sweep(file: Path) -> Sweep:
    """The sweep in a TOML file.

    Raises:
        InputError: it cannot be read, or names what no sweep can have.
    """
    try:
        sweep = Sweep.model_validate(read_settings_file(file))
    except ValidationError as error:
        raise InputError(f"'{file}' is no sweep: {one_sentence(error)}") from error
    check_run_name(sweep.name)
    return sweep


def share_base_scores(source: RunPaths, target: RunPaths) -> None:
    """Copy the scores of the base and of scripted players, so that they are not measured again."""
    there = read_scores(target)
    for label, record in read_scores(source).items():
        if record.policy_version == BASE_VERSION and label not in there:
            write_score(target, record)


class SweepState:
    """A sweep, its runs so far, and its file."""

    def __init__(self, sweep: Sweep, runs_root: Path) -> None:
        """The sweep before its first run. `points` are its settings; the first is the one that others are compared with.

        Raises:
            InputError: a setting is unknown or refuses a value, or the runs cannot share a process.
        """
        check_run_name(sweep.name)
        self.sweep, self.runs_root = sweep, runs_root
        self.file = runs_root / SWEEP_FOLDER / f"{sweep.name}.json"
        self.lock = self.file.with_name(f".{sweep.name}.lock")
        """Lock of the process that trains it."""
        self.points: list[Point] = []
        self.runs: list[SweepRun] = []
        self.scores: dict[str, list[float]] = {}
        """Run -> its score after each rung that it has done."""
        self.failed: dict[str, str] = {}
        """Run -> why its training failed."""
        if sweep.samples:
            self.tried = [run for point in each_value(sweep.settings) for run in self._runs(point, 0)]
            """Runs with every value that may be drawn, to be checked; they are never trained."""
            for _ in range(RANDOM_FIRST if sweep.search == "tpe" else sweep.samples):
                self._add(draw(sweep.settings, sweep.search_seed, {}, self.points, self._accepts))
        else:
            for point in every_combination({name: list(values) for name, values in sweep.settings.items()}):
                self._add(point)
            self.tried = self.runs
        _check_together(self.tried)

    def _runs(self, point: Point, place: int) -> list[SweepRun]:
        """The runs of a setting, by seed."""
        found = []
        for number, seed in enumerate(self.sweep.seeds, 1 + place * len(self.sweep.seeds)):
            given: dict[str, Any] = {"run": f"{self.sweep.name}-{number}", "runs_root": self.runs_root, "seed": seed}
            if self.sweep.rungs:
                given["steps"] = self.sweep.rungs[-1]
            settings = layered_settings(self.sweep.preset, map(Path, self.sweep.config), _tree(given | point))
            if not settings.telemetry.wandb_group:
                telemetry = settings.telemetry.model_copy(update={"wandb_group": self.sweep.name})
                settings = settings.model_copy(update={"telemetry": telemetry})
            found.append(SweepRun(point=place, settings=settings))
        return found

    def _add(self, point: Point) -> None:
        runs = self._runs(point, len(self.points))
        self.points.append(point)
        self.runs += runs
        self.scores |= {run.name: [] for run in runs}

    def _accepts(self, point: Point) -> bool:
        """Whether settings take these values together; each alone was checked."""
        try:
            return bool(self._runs(point, 0))
        except InputError:
            return False

    def check_new(self) -> None:
        """Check that the sweep can begin.

        Raises:
            InputError: there is a sweep of this name, or a run of one of its runs' names.
        """
        if FILES.exists(self.file):
            raise InputError(
                f"sweep '{self.sweep.name}' was begun: continue it with --resume, or choose another name in its file"
            )
        for number in range(1, self.sweep.run_count + 1):
            run = f"{self.sweep.name}-{number}"
            if FILES.exists(RunPaths(self.runs_root / run).settings):
                raise InputError(f"run '{run}' exists already and belongs to no sweep: choose another name in the sweep's file")

    def begin(self) -> None:
        """Write the file of a new sweep.

        Raises:
            InputError: see `check_new`.
        """
        self.check_new()
        make_directory(self.file.parent)
        self._write()

    def read(self) -> None:
        """Read the file: the settings that were drawn, scores and failures.

        Raises:
            InputError: there is none, or it is of other runs.
            DataError: it is damaged.
        """
        if not FILES.exists(self.file):
            raise InputError(f"no sweep '{self.sweep.name}' was begun in '{self.file.parent}': leave out --resume or --table")
        record = read_object(self.file)
        try:
            if record["sweep"] | {"preset": "", "config": []} != self._said() | {"preset": "", "config": []}:
                raise self._other_runs()
            points = record.get("points", self.points)  # files of another version have none, and list all combinations
            self.points, self.runs, self.scores = [], [], {}
            for point in points:
                self._add({name: point[name] for name in self.sweep.settings})
            self.scores = {run: list(map(float, record["scores"][run])) for run in self.scores}
            self.failed = {run: str(record["failed"][run]) for run in self.scores if run in record["failed"]}
            if record["runs"] != self._planned():
                raise self._other_runs()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"'{self.file}' is damaged ({error!r}): restore it, or begin again under another name") from error

    def resume(self) -> None:
        """Read the file; runs that had failed are tried again. Raises what `read` raises."""
        self.read()
        self.failed = {}

    def _other_runs(self) -> InputError:
        return InputError(
            f"sweep '{self.sweep.name}' was begun with other runs or settings: restore its file, or choose another name in it"
        )

    def due(self) -> list[tuple[SweepRun, int]]:
        """The runs of the current rung that have not done it, with the number of steps that they train to; [] if none is left."""
        alive = set(range(len(self.points)))
        for rung, steps in enumerate(self.sweep.rungs or (0,)):
            there = [run for run in self.runs if run.point in alive and run.name not in self.failed]
            left = [(run, steps or run.settings.steps) for run in there if len(self.scores[run.name]) <= rung]
            if left:
                return left
            alive = survivors({point: self.mean(point, rung) for point in {run.point for run in there}})
        return []

    @property
    def undrawn(self) -> int:
        """Settings that are drawn when those before them have scores."""
        return self.sweep.samples - len(self.points) if self.sweep.search == "tpe" else 0

    def draw_next(self) -> list[tuple[SweepRun, int]]:
        """Draw the next setting by the scores of the others, which are done; its runs, as `due`. [] if all have been drawn."""
        if not self.undrawn:
            return []
        done = {point: any(self.scores[run.name] for run in self.of_point(point)) for point in range(len(self.points))}
        earlier = {point: self.mean(point, 0) if scored else None for point, scored in done.items()}
        self._add(draw(self.sweep.settings, self.sweep.search_seed, earlier, self.points, self._accepts))
        self._write()
        return self.due()

    def of_point(self, point: int) -> list[SweepRun]:
        """The runs of a setting, by seed."""
        return [run for run in self.runs if run.point == point]

    def mean(self, point: int, rung: int) -> float:
        """Mean score of a setting over the seeds that have done this rung."""
        done = [self.scores[run.name][rung] for run in self.of_point(point) if len(self.scores[run.name]) > rung]
        return sum(done) / len(done)

    def done(self, run: SweepRun, score: float) -> None:
        """Note the score of a run after its next rung."""
        self.scores[run.name].append(score)
        self._write()

    def fail(self, run: SweepRun, why: str) -> None:
        """Note that a run's training failed; its setting is judged by its other seeds."""
        self.failed[run.name] = why
        self._write()

    def _planned(self) -> list[dict[str, Any]]:
        return [{"run": run.name, "settings": _digest(run.settings)} for run in self.runs]

    def _said(self) -> dict[str, Any]:
        return self.sweep.model_dump(mode="json")

    def _write(self) -> None:
        record = {"sweep": self._said(), "points": self.points, "runs": self._planned()}
        record |= {"scores": self.scores, "failed": self.failed}
        durable_write(self.file, json.dumps(record, indent=1).encode())


def _check_together(runs: list[SweepRun]) -> None:
    """Check that these runs can be scored, and share a process."""
    if any(run.settings.simulated.from_run for run in runs):
        raise InputError("simulated.from_run plays no games, so there is no score to compare: leave it out")
    if len(threads := sorted({run.settings.threads[0] for run in runs})) > 1:
        raise InputError(
            f"the engine would have {' and '.join(map(str, threads))} threads in different runs, and one process has one number: "
            "set inference.threads and training.threads"
        )


def _digest(settings: RunSettings) -> str:
    tree = settings.model_dump(mode="json", exclude={"runs_root"})  # the folder may have been moved
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name -> values, of a table with dotted or quoted names. A table with `low` and `high` is a range."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and not {"low", "high"} <= set(value):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _tree(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name as a tree."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return tree
