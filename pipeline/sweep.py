"""A sweep: runs that differ in some settings and in their seed, under one folder of runs.

    runs/_sweeps/<name>.json    the sweep, and the settings that were chosen so far
    runs/<name>-<n>/            the runs, counted from 1: all seeds of the first setting, then those of the second ...

A *setting* of a sweep, or point, is one choice of values for the settings that it varies. A grid lists all combinations; every
other point is drawn by optuna, and read from the file afterwards. A run's summary holds its score. This module starts nothing.
"""

import itertools
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from evaluation.intervals import clusters_to_show, estimate, format_interval
from evaluation.settings import SCORE_SEED
from pipeline.run_settings import RunSettings, layered_settings, merge_layers, one_sentence, read_settings_file
from pipeline.setting_names import setting_names, similar_names
from storage.json_files import read_object, write_json
from storage.runs import RunPaths, check_run_name
from telemetry.errors import DataError, InputError
from telemetry.setting_marks import Seed, Settings

SWEEP_FOLDER = "_sweeps"
"""Folder beside the runs."""
_MOST_RUNS = 1000
"""Runs of a sweep at most: each takes minutes, so more are a mistake."""
_DRAWS = 500
"""Draws in which a point must be found that is new and that the settings accept."""
_OWN = {"run": "name", "runs_root": "--runs-root", "seed": "seeds"}
Point = dict[str, Any]


class Range(Settings):
    """Numbers from `low` to `high`, both included; whole ones if `low`, `high` and `step` are whole."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    low: int | float
    """Lowest value."""
    high: int | float
    """Highest value."""
    log: bool = False
    """Whether equal factors are equally probable, as for learning rates, instead of equal differences."""
    step: int | float | None = None
    """Difference of neighbouring values; none: 1 for whole numbers, and any for others."""

    @model_validator(mode="after")
    def _check(self) -> "Range":
        with warnings.catch_warnings(action="error"):  # optuna warns where steps do not lead to the end, and changes the end
            try:
                self.distribution()
            except UserWarning as error:
                raise ValueError(str(error)) from error
        return self

    def distribution(self) -> Any:
        """The range as optuna has it."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if isinstance(self.low, int) and isinstance(self.high, int) and not isinstance(self.step, float):
            return IntDistribution(self.low, self.high, log=self.log, step=1 if self.step is None else self.step)
        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)


Values = Annotated[
    Annotated[list[Any], Tag("values")] | Annotated[Range, Tag("range")],
    Discriminator(lambda given: "range" if isinstance(given, Range | Mapping) else "values"),
]


class Sweep(Settings):
    """What a sweep's file says."""

    model_config = ConfigDict(title="Sweep")

    name: str
    """Name of the sweep, and beginning of its runs' names."""
    preset: str = "laptop"
    """Preset of all runs."""
    config: tuple[str, ...] = ()
    """TOML files laid over the preset; later ones win."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    """Seeds with which each setting is trained."""
    search: Literal["grid", "random", "tpe"] = "grid"
    """'grid': every combination of values; 'random': `samples` of them; 'tpe': `samples`, each chosen by the scores of those
    before it."""
    samples: Annotated[int, Field(ge=0)] = 0
    """Combinations that 'random' and 'tpe' draw, without repetition."""
    search_seed: Seed = 0
    """Seed of the draws."""
    settings: Annotated[dict[str, Values], Field(min_length=1)]
    """Dotted name of a setting -> its values: a list, or {"low": 1e-5, "high": 1e-3, "log": true} where values are drawn."""

    @field_validator("settings", mode="before")
    @classmethod
    def _flat(cls, tree: Any) -> Any:
        return _leaves(tree) if isinstance(tree, Mapping) else tree

    @model_validator(mode="after")
    def _check(self) -> "Sweep":
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {list(self.seeds)} name one twice: leave it out")
        if (self.search != "grid") != bool(self.samples):
            raise ValueError(
                f"search '{self.search}' with samples {self.samples}: 'random' and 'tpe' take samples, 'grid' takes none"
            )
        known = tuple(setting_names(RunSettings))
        for name, values in self.settings.items():
            if name in _OWN:
                raise ValueError(f"settings cannot vary {name}: a sweep has {_OWN[name]} for it")
            if name not in known:
                meant = " or ".join(similar_names(name, known))
                raise ValueError(f"there is no setting '{name}'" + (f"; did you mean {meant}?" if meant else ""))
            if isinstance(values, Range):
                if self.search == "grid":
                    raise ValueError(
                        f"settings.{name} is a range: give search 'random' or 'tpe' and samples, or a list of values"
                    )
            elif not values:
                raise ValueError(f"settings.{name} has no values: give at least one")
            elif any(value in values[:place] for place, value in enumerate(values)):
                raise ValueError(f"settings.{name} {values} names a value twice: leave it out")
        if self.run_count > _MOST_RUNS:
            raise ValueError(
                f"the sweep has {self.run_count} runs, and at most {_MOST_RUNS} are allowed: give fewer values or seeds"
            )
        return self

    @property
    def run_count(self) -> int:
        """Runs of the whole sweep."""
        lists = (len(values) for values in self.settings.values() if not isinstance(values, Range))
        return len(self.seeds) * (self.samples or math.prod(lists))


def read_sweep(file: Path) -> Sweep:
    """The sweep in a TOML file.

    Raises:
        InputError: it cannot be read, or names what no sweep can have.
    """
    try:
        return Sweep.model_validate(read_settings_file(file))
    except ValidationError as error:
        raise InputError(f"'{file}' is no sweep: {one_sentence(error)}") from error


def base_question(run: RunSettings) -> str:
    """What the scores of the base depend on. Runs with equal ones share them."""
    chosen = run.model_dump(mode="json", include={"inference", "tiny_model", "prompts", "cache"})
    return json.dumps([chosen, run.evaluation.question.model_dump(mode="json")], sort_keys=True)


def score_of(run: RunSettings) -> float | None:
    """Gain of the trained policy in centres a year; None until the run is done."""
    if not run.paths.summary.exists():
        return None
    summary = read_object(run.paths.summary)
    return float(summary["trained_score"]) if summary["steps"] == run.steps else None


class SweepState:
    """A sweep, its runs so far, and its file."""

    def __init__(self, sweep: Sweep, runs_root: Path) -> None:
        """The sweep before its first run. The first point is the one that others are compared with.

        Raises:
            InputError: a setting refuses a value, or the runs cannot share a process.
        """
        check_run_name(sweep.name)
        self.sweep, self.runs_root = sweep, runs_root
        self.file = runs_root / SWEEP_FOLDER / f"{sweep.name}.json"
        self.lock = self.file.with_name(f".{sweep.name}.lock")
        """Lock of the process that trains it."""
        self.drawn: list[dict[str, Any]] = []
        """Points as optuna has them: of a list of values the place in it, because a value may itself be a list."""
        self.points: list[Point] = []
        self.runs: list[RunSettings] = []
        """The runs of the points chosen so far: of each point one for each seed."""
        self.failed: dict[str, str] = {}
        """Run -> why its training failed in this process."""
        ends = {
            name: [each.low, each.high] if isinstance(each, Range) else range(len(each)) for name, each in sweep.settings.items()
        }
        if sweep.search == "grid":
            for drawn in itertools.product(*ends.values()):
                self._add(dict(zip(ends, drawn, strict=True)))
            self.tried = self.runs
        else:
            first = {name: values[0] for name, values in ends.items()}
            each_value = [first, *(first | {name: value} for name, values in ends.items() for value in values[1:])]
            self.tried = [run for drawn in each_value for run in self._runs_of(self._point(drawn), 0)]
            """Runs with every value that may be drawn, to be checked; they are never trained."""
            for _ in range(sweep.samples if sweep.search == "random" else 1):
                if not self._draw():
                    raise InputError(
                        f"only {len(self.points)} combinations of values were found that the settings accept: lower samples"
                    )
        if len(threads := sorted({run.threads[0] for run in self.tried})) > 1:
            raise InputError(
                f"the engine would have {' and '.join(map(str, threads))} threads in different runs, and one process has one "
                "number: set inference.threads and training.threads"
            )

    @property
    def left(self) -> list[RunSettings]:
        """Those that are not done and did not fail in this process."""
        return [run for run in self.runs if run.run not in self.failed and score_of(run) is None]

    @property
    def undrawn(self) -> int:
        """Points that are drawn when those before them have scores."""
        return self.sweep.samples - len(self.points) if self.sweep.search == "tpe" else 0

    def _runs_of(self, point: Point, place: int) -> list[RunSettings]:
        """The runs of a point, by seed."""
        found = []
        for number, seed in enumerate(self.sweep.seeds, 1 + place * len(self.sweep.seeds)):
            given = {"run": f"{self.sweep.name}-{number}", "runs_root": self.runs_root, "seed": seed}
            tree = reduce(merge_layers, (_nested(name, value) for name, value in point.items()), given)
            found.append(layered_settings(self.sweep.preset, map(Path, self.sweep.config), tree))
        return found

    def _point(self, drawn: Mapping[str, Any]) -> Point:
        given = self.sweep.settings
        return {name: value if isinstance(each := given[name], Range) else each[value] for name, value in drawn.items()}

    def _add(self, drawn: dict[str, Any]) -> None:
        point = self._point(drawn)
        self.runs += self._runs_of(point, len(self.points))
        self.points.append(point)
        self.drawn.append(drawn)

    def of_point(self, point: int) -> list[RunSettings]:
        """The runs of a point, by seed."""
        return self.runs[point * len(self.sweep.seeds) :][: len(self.sweep.seeds)]

    def describe(self, run: RunSettings) -> str:
        """What tells the run from the others: its seed, and its point."""
        point = self.points[self.runs.index(run) // len(self.sweep.seeds)]
        return ", ".join(f"{name} {value}" for name, value in {"seed": run.seed, **point}.items())

    def draw_next(self) -> bool:
        """Draw the next point by the scores of the others; False if all are drawn, or if none is found that was not tried."""
        if drawn := self.undrawn > 0 and self._draw():
            self._write()
        return drawn

    def _draw(self) -> bool:
        """Add a point that is not there yet and that the settings accept. Equal points and scores give equal draws."""
        import optuna
        from optuna.distributions import CategoricalDistribution
        from optuna.trial import TrialState

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        kind = optuna.samplers.TPESampler if self.sweep.search == "tpe" else optuna.samplers.RandomSampler
        sampler = kind(seed=(self.sweep.search_seed * _MOST_RUNS + len(self.points)) % 2**32)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        space: dict[str, Any] = {
            name: each.distribution() if isinstance(each, Range) else CategoricalDistribution(range(len(each)))
            for name, each in self.sweep.settings.items()
        }
        for place, drawn in enumerate(self.drawn):
            scores = [score for run in self.of_point(place) if (score := score_of(run)) is not None]
            mean, state = (sum(scores) / len(scores), TrialState.COMPLETE) if scores else (None, TrialState.FAIL)
            study.add_trial(optuna.create_trial(params=drawn, distributions=space, value=mean, state=state))
        for _ in range(_DRAWS):
            drawn = study.ask(space).params
            if drawn not in self.drawn:
                with suppress(InputError):  # settings take each value alone, but not these together: draw again
                    self._add(drawn)
                    return True
        return False

    def check_new(self) -> None:
        """Check that the sweep can begin.

        Raises:
            InputError: there is a sweep of this name, or a run of one of its runs' names.
        """
        if self.file.exists():
            raise InputError(
                f"sweep '{self.sweep.name}' was begun: continue it with --resume, or choose another name in its file"
            )
        for number in range(1, self.sweep.run_count + 1):
            run = f"{self.sweep.name}-{number}"
            if RunPaths(self.runs_root / run).settings.exists():
                raise InputError(f"run '{run}' exists already and belongs to no sweep: choose another name in the sweep's file")

    def begin(self) -> None:
        """Write the file of a new sweep.

        Raises:
            InputError: see `check_new`.
        """
        self.check_new()
        self._write()

    def resume(self) -> None:
        """Read from the file which points were chosen.

        Raises:
            InputError: there is none, or it is of another sweep.
            DataError: it is damaged.
        """
        if not self.file.exists():
            raise InputError(f"no sweep '{self.sweep.name}' was begun in '{self.file.parent}': leave out --resume")
        record = read_object(self.file)
        try:
            if record["sweep"] != self.sweep.model_dump(mode="json"):
                raise InputError(
                    f"sweep '{self.sweep.name}' was begun with other settings: restore its TOML file, or choose another name"
                )
            self.drawn, self.points, self.runs = [], [], []
            for drawn in record["drawn"]:
                self._add({name: drawn[name] for name in self.sweep.settings})
        except (LookupError, TypeError) as error:
            raise DataError(f"'{self.file}' is damaged ({error!r}): restore it, or begin again under another name") from error

    def _write(self) -> None:
        write_json(self.file, {"sweep": self.sweep.model_dump(mode="json"), "drawn": self.drawn})


def sweep_results(state: SweepState) -> list[dict[str, Any]]:
    """One object for each setting: its values and runs, its score over seeds, and what it gains over the first setting.

    A seed is a cluster: runs of one seed meet the same positions and luck, so settings are compared seed by seed.
    """
    return [_result(state, point) for point in range(len(state.points))]


def _result(state: SweepState, point: int) -> dict[str, Any]:
    def over_seeds(by_seed: Mapping[int, float]) -> dict[str, Any] | None:
        if not by_seed:
            return None
        found = estimate(list(by_seed.values()), list(by_seed), SCORE_SEED)
        return {"mean": round(found.mean, 4), "interval": found.rounded(), "seeds": found.clusters}

    first, ours = ({run.seed: score_of(run) for run in state.of_point(each)} for each in (0, point))
    scores = {seed: score for seed, score in ours.items() if score is not None}
    gains = {seed: score - base for seed, score in scores.items() if point and (base := first[seed]) is not None}
    return {
        "settings": state.points[point],
        "runs": [run.run for run in state.of_point(point)],
        "score": over_seeds(scores),
        "over_first": over_seeds(gains),
        "seeds_to_show": clusters_to_show(list(gains.values())) if gains else None,
    }


def result_rows(results: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The table of results, column -> text, with the same columns in each row."""

    def text(found: Mapping[str, Any] | None) -> str:
        return "" if found is None else f"{found['mean']:+.3f} {format_interval(found['interval'], '+.3f')}"

    return [
        {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in each["settings"].items()}
        | {
            "seeds": f"{each['score']['seeds'] if each['score'] else 0} of {len(each['runs'])}",
            "score": text(each["score"]),
            "over the first": text(each["over_first"]),
            "seeds to show it": str(each["seeds_to_show"] or ""),
        }
        for each in results
    ]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> values, of a table with dotted or quoted names. A table with `low` and `high` is a range."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, Mapping) and not {"low", "high"} <= set(value)
        found |= _leaves(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return found


def _nested(name: str, value: Any) -> dict[str, Any]:
    """A setting by dotted name as a tree."""
    return reduce(lambda inner, part: {part: inner}, reversed(name.split(".")), value)
