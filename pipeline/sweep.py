"""A sweep: runs that differ in some settings and in their seed, under one folder of runs.

    runs/_sweeps/<name>.json    the sweep, its runs, and the score of each run after each rung
    runs/<name>-<n>/            the runs, counted from 1: all seeds of the first setting, then those of the second ...

A *setting* of a sweep is one choice of values for the settings that it varies. A *rung* is a number of steps after which a search
by halving keeps the best third of the settings; other searches have one rung, the end of each run. This module starts nothing.
"""

import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from evaluation.score_files import read_scores, write_score
from pipeline.run_settings import RunSettings, layered_settings, one_sentence
from pipeline.setting_names import setting_names, similar_names
from pipeline.settings_file import read_settings_file
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
    search: Literal["grid", "random", "halving"] = "grid"
    """'grid': every combination of values; 'random': `samples` of them; 'halving': all, or `samples`, and after each rung the
    best third goes on."""
    samples: Annotated[int, Field(ge=0)] = 0
    """Combinations that are drawn without repetition; 0: all."""
    search_seed: int = 0
    """Seed of that draw."""
    rungs: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field()] = ()
    """Steps after which 'halving' drops settings; the last one ends the sweep."""
    settings: Annotated[dict[str, list[Any]], Field(min_length=1)]
    """Dotted name of a setting -> its values."""

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
            if not values:
                raise ValueError(f"settings.{name} has no values: give at least one")
            if any(value in values[:place] for place, value in enumerate(values)):
                raise ValueError(f"settings.{name} {values} names a value twice: leave it out")
        if (self.search == "random") > bool(self.samples) or (self.search == "grid" and self.samples):
            raise ValueError(f"search '{self.search}' with samples {self.samples}: 'random' takes samples, 'grid' takes none")
        if self.samples > self.combinations:
            raise ValueError(f"samples {self.samples} exceeds the {self.combinations} combinations of settings: lower it")
        if (self.search == "halving") != bool(self.rungs) or list(self.rungs) != sorted(set(self.rungs)):
            raise ValueError(
                f"search '{self.search}' with rungs {list(self.rungs)}: 'halving' alone takes rungs, in rising order"
            )
        if self.rungs and "steps" in self.settings:
            raise ValueError("settings cannot vary steps in a search by 'halving': its rungs are steps")
        if (count := len(self.seeds) * (self.samples or self.combinations)) > _MOST_RUNS:
            raise ValueError(f"the sweep has {count} runs, and at most {_MOST_RUNS} are allowed: give fewer values or seeds")
        return self

    @property
    def combinations(self) -> int:
        """Combinations of all values."""
        return math.prod(len(values) for values in self.settings.values())

    @property
    def points(self) -> list[dict[str, Any]]:
        """The settings of the sweep, dotted name -> value. The first is the one that others are compared with."""
        combined = itertools.product(*self.settings.values())
        if not self.samples:
            return [dict(zip(self.settings, values, strict=True)) for values in combined]
        drawn = random.Random(self.search_seed).sample(range(self.combinations), self.samples)
        return [_nth(self.settings, number) for number in drawn]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One run of a sweep."""

    point: int
    """Place of its setting among `Sweep.points`."""
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


def runs_of(sweep: Sweep, runs_root: Path) -> list[SweepRun]:
    """The runs in the order in which they are trained.

    Raises:
        InputError: a setting is unknown or refuses a value, or the runs cannot share a process.
    """
    found = []
    for point, values in enumerate(sweep.points):
        for seed in sweep.seeds:
            given: dict[str, Any] = {"run": f"{sweep.name}-{len(found) + 1}", "runs_root": runs_root, "seed": seed}
            if sweep.rungs:
                given["steps"] = sweep.rungs[-1]
            settings = layered_settings(sweep.preset, map(Path, sweep.config), _tree(given | values))
            if not settings.telemetry.wandb_group:
                telemetry = settings.telemetry.model_copy(update={"wandb_group": sweep.name})
                settings = settings.model_copy(update={"telemetry": telemetry})
            found.append(SweepRun(point=point, settings=settings))
    if any(run.settings.simulated.from_run for run in found):
        raise InputError("simulated.from_run plays no games, so there is no score to compare: leave it out")
    if len(threads := sorted({run.settings.threads[0] for run in found})) > 1:
        raise InputError(
            f"the engine would have {' and '.join(map(str, threads))} threads in different runs, and one process has one number: "
            "set inference.threads and training.threads"
        )
    return found


def survivors(scores: Mapping[int, float]) -> set[int]:
    """The best third of the settings, at least one; of equal ones the earlier. `scores`: place of the setting -> its mean."""
    ranked = sorted(scores, key=lambda point: (-scores[point], point))
    return set(ranked[: math.ceil(len(ranked) / 3)])


def share_base_scores(source: RunPaths, target: RunPaths) -> None:
    """Copy the scores of the base and of scripted players, so that they are not measured again."""
    there = read_scores(target)
    for label, record in read_scores(source).items():
        if record.policy_version == BASE_VERSION and label not in there:
            write_score(target, record)


class SweepState:
    """A sweep that was begun, and its file."""

    def __init__(self, sweep: Sweep, runs_root: Path) -> None:
        self.sweep, self.runs = sweep, runs_of(sweep, runs_root)
        self.file = runs_root / SWEEP_FOLDER / f"{sweep.name}.json"
        self.scores: dict[str, list[float]] = {run.name: [] for run in self.runs}
        """Run -> its score after each rung that it has done."""
        self.failed: dict[str, str] = {}
        """Run -> why its training failed."""

    def begin(self) -> None:
        """Write the file of a new sweep.

        Raises:
            InputError: there is a sweep of this name, or a run of one of its runs' names.
        """
        if FILES.exists(self.file):
            raise InputError(
                f"sweep '{self.sweep.name}' was begun: continue it with --resume, or choose another name in its file"
            )
        if taken := [run.name for run in self.runs if FILES.exists(run.settings.paths.settings)]:
            raise InputError(f"run '{taken[0]}' exists already and belongs to no sweep: choose another name in the sweep's file")
        make_directory(self.file.parent)
        self._write()

    def resume(self) -> None:
        """Read the file; runs that had failed are tried again.

        Raises:
            InputError: there is none, or it is of other runs.
            DataError: it is damaged.
        """
        if not FILES.exists(self.file):
            raise InputError(f"no sweep '{self.sweep.name}' was begun in '{self.file.parent}': leave out --resume")
        record = read_object(self.file)
        try:
            begun, self.scores = record["runs"], {run: list(map(float, record["scores"][run])) for run in self.scores}
            self.failed = {}
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, KeyError) and "scores" in record:
                raise self._other_runs() from error
            raise DataError(f"'{self.file}' is damaged ({error!r}): restore it, or begin again under another name") from error
        if begun != self._planned():
            raise self._other_runs()

    def _other_runs(self) -> InputError:
        return InputError(
            f"sweep '{self.sweep.name}' was begun with other runs or settings: restore its file, or choose another name in it"
        )

    def due(self) -> list[tuple[SweepRun, int]]:
        """The runs of the current rung that have not done it, with the number of steps that they train to; [] at the end."""
        alive = set(range(len(self.sweep.points)))
        for rung, steps in enumerate(self.sweep.rungs or (0,)):
            there = [run for run in self.runs if run.point in alive and run.name not in self.failed]
            left = [(run, steps or run.settings.steps) for run in there if len(self.scores[run.name]) <= rung]
            if left:
                return left
            alive = survivors({point: self.mean(point, rung) for point in {run.point for run in there}})
        return []

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

    def _write(self) -> None:
        record = {"sweep": self.sweep.model_dump(mode="json"), "runs": self._planned()}
        record |= {"scores": self.scores, "failed": self.failed}
        durable_write(self.file, json.dumps(record, indent=1).encode())


def _digest(settings: RunSettings) -> str:
    tree = settings.model_dump(mode="json", exclude={"runs_root"})  # the folder may have been moved
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name -> value, of a table with dotted or quoted names."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
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


def _nth(settings: Mapping[str, Sequence[Any]], number: int) -> dict[str, Any]:
    """The combination of this number, counted as `itertools.product` does, without making the others."""
    found = {}
    for name, values in reversed(list(settings.items())):
        number, place = divmod(number, len(values))
        found[name] = values[place]
    return {name: found[name] for name in settings}
