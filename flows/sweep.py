"""A sweep: runs that differ in some settings and in their seed, under one folder of runs.

    runs/<name>-<n>/    the runs, counted from 1: all seeds of the first combination of values, then those of the second ...

Its TOML file determines the runs, and their summaries hold the scores; there is no other file. This module starts no run.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from entente.evaluation.intervals import clusters_to_show, estimate, format_interval
from entente.evaluation.settings import SCORE_SEED
from entente.players.opponents import POLICY
from entente.settings.layers import (
    changed_settings,
    check_resumed,
    layered_settings,
    merge_layers,
    one_sentence,
    read_settings_file,
    settings_of,
)
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from entente.telemetry.setting_marks import Settings, leaves, setting_names, similar_names
from state_cache.settings import NEWEST
from storage.control import code_of_play
from storage.json_files import kept_object
from storage.runs import check_run_name

if TYPE_CHECKING:
    from entente.evaluation.score_files import ScoreRecord

_MOST_RUNS = 1000
"""Upper bound of runs in a sweep: each takes minutes, so more are a mistake."""
_OWN = {"run": "name", "runs_root": "--runs-root", "seed": "seeds", "training.seed": "seeds"}


class Sweep(Settings):
    """Content of a sweep file."""

    model_config = ConfigDict(title="Sweep")

    name: str
    """Name of the sweep, and prefix of its runs' names."""
    preset: str = "laptop"
    """Preset of all runs."""
    config: tuple[str, ...] = ()
    """TOML files laid over the preset; later ones win."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    """Seeds to train each combination of values with."""
    settings: Annotated[dict[str, list[Any]], Field(min_length=1)]
    """Dotted name of a setting -> its values; every combination is trained."""

    @field_validator("settings", mode="before")
    @classmethod
    def _flat(cls, tree: Any) -> Any:
        return leaves(tree) if isinstance(tree, Mapping) else tree

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
            if not values or any(value in values[:place] for place, value in enumerate(values)):
                raise ValueError(f"settings.{name} {values} has no value, or one twice: give each once")
        if (count := len(self.seeds) * prod(map(len, self.settings.values()))) > _MOST_RUNS:
            raise ValueError(f"the sweep has {count} runs, and at most {_MOST_RUNS} are allowed: give fewer values or seeds")
        return self


def read_sweep(file: Path) -> Sweep:
    """The sweep in a TOML file; raises InputError if it is unreadable or invalid."""
    try:
        return Sweep.model_validate(read_settings_file(file))
    except ValidationError as error:
        raise InputError(f"'{file}' is no sweep: {one_sentence(error)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    values: Mapping[str, Any]
    """By dotted name."""
    runs: Sequence[RunSettings]
    """One for each seed."""

    @property
    def scores(self) -> dict[int, float]:
        return {run.seed: score for run in self.runs if (score := score_of(run)) is not None}


def sweep_points(sweep: Sweep, runs_root: Path | None = None) -> list[SweepPoint]:
    """All combinations of values; the first is the baseline. `runs_root` overrides that of the sweep's files. Raises
    InputError if a setting refuses a value, or the runs cannot share a process."""
    check_run_name(sweep.name)
    numbers, points = itertools.count(1), list[SweepPoint]()
    for values in itertools.product(*sweep.settings.values()):
        point = dict(zip(sweep.settings, values, strict=True))
        tree = reduce(merge_layers, (_nested(name, value) for name, value in point.items()), dict[str, Any]())
        root = {} if runs_root is None else {"runs_root": runs_root}
        overrides = [{"run": f"{sweep.name}-{next(numbers)}", "seed": seed} | root for seed in sweep.seeds]
        runs = [layered_settings(sweep.preset, map(Path, sweep.config), merge_layers(tree, each)) for each in overrides]
        points.append(SweepPoint(values=point, runs=runs))
    if any(run.cache.from_run == NEWEST for point in points for run in point.runs):
        raise InputError(
            "the runs of a sweep start from the same positions, and a refresh may come between two of them: name one by "
            "cache.from_run and cache.from_groups"
        )
    if len({run.evaluation.question.model_dump_json() for point in points for run in point.runs}) > 1:
        raise InputError(
            "the runs of a sweep are compared by their scores, so these are measured alike: of evaluation, settings can vary "
            "'every' alone"
        )
    if len(threads := sorted({run.threads[0] for point in points for run in point.runs})) > 1:
        raise InputError(
            f"the engine would have {' and '.join(map(str, threads))} threads in different runs, and one process has one "
            "number: set inference.threads and training.threads"
        )
    return points


def check_name_of_sweep(run: RunSettings, sweep: str, *, resume: bool, varied: Iterable[str] = ()) -> None:
    """Raise InputError, with what a sweep can do about it, if the run exists without `resume` or with other settings, of those
    that a resumed run may change the `varied` ones and those that decide which rows a step uses: the table would name values
    that the run was not trained with, or compare it with runs that differ by more."""
    if not run.paths.settings.exists():
        return
    if not resume:
        raise InputError(
            f"run '{run.run}' exists already in {run.runs_root}: continue the sweep with --resume, or choose another name "
            f"than '{sweep}' in its file"
        )
    cure = f"restore it in the sweep's file, or choose another name than '{sweep}' there"
    check_resumed(stored := settings_of(run.paths), run, cure)
    before, after = (leaves(each.model_dump(mode="json")) for each in (stored, run))
    for name in (*varied, *changed_settings(stored, run)):
        if name != "steps" and before.get(name) != after.get(name):  # a run with fewer steps goes on
            raise InputError(
                f"run '{run.run}' was started with {name} {before.get(name)!r}, and the sweep has {after.get(name)!r} for it: "
                f"{cure}"
            )


def base_question(run: RunSettings) -> str:
    """Key of the base scores: runs with equal keys share them."""
    chosen = run.model_dump(mode="json", include={"inference", "tiny_model", "prompts", "cache"})
    return json.dumps([chosen, run.evaluation.question.model_dump(mode="json")], sort_keys=True)


def score_of(run: RunSettings) -> float | None:
    """Centres that the trained policy gains over `evaluation.horizon_years`; None until the run is done and scored as its
    settings ask."""
    if not (summary := kept_object(run.paths.summary)):
        return None
    asked = summary["steps"], settings_of(run.paths).evaluation.question
    return float(summary["trained_score"]) if asked == (run.steps, run.evaluation.question) else None


def scored_elsewhere(points: Sequence[SweepPoint]) -> str:
    """A sentence if the scores are of different held-out positions, as where the sweep varies cache.last_year; else empty."""
    records = _trained_scores(points).values()
    starts = {frozenset((gain.snapshot_id, gain.power) for gain in record.score.gains) for record in records}
    if len(starts - {frozenset()}) <= 1:
        return ""
    return (
        "the runs have different held-out positions, so their scores differ by more than settings: compare them in matches, with "
        "entente evaluate"
    )


def _trained_scores(points: Sequence[SweepPoint]) -> dict[str, "ScoreRecord"]:
    """By run."""
    from entente.evaluation.score_files import read_score  # loads the game engine, which help does not need

    runs = (run for point in points for run in point.runs if score_of(run) is not None)
    return {run.run: record for run in runs if (record := read_score(run.paths, "trained")) is not None}


def scored_by_others(points: Sequence[SweepPoint]) -> str:
    """A sentence if programs that may play differently measured the scores, as after an edit of a bot; else empty."""
    scored = _trained_scores(points)
    records = {run: (record.code, code_of_play((POLICY, record.opponents))) for run, record in scored.items()}
    codes = [code for code, _ in records.values()]
    if all(code == codes[0] for code in codes):
        return ""
    others = ", ".join(name for name, (code, here) in records.items() if code != here)
    return (
        f"programs that may play differently measured the scores, so these differ by more than settings: remove summary.json of "
        f"{others}, and --resume scores them again"
    )


def trained_elsewhere(points: Sequence[SweepPoint]) -> str:
    """A sentence if the runs were trained by other programs, packages or machines, as after an edit of a loss; else empty."""
    runs = [run for point in points for run in point.runs if score_of(run) is not None]
    records = [record for run in runs if (record := kept_object(run.paths.environment))]
    names = dict.fromkeys(name for record in records for name in record)
    if any(run.cache != runs[0].cache for run in runs):
        names.pop("positions", None)  # the sweep varies them
    values = {name: {record[name] for record in records if name in record} for name in names}
    if not (other := ", ".join(name for name in names if len(values[name]) > 1)):
        return ""
    return (
        f"the runs were trained with different {other}, so their scores may differ by more than settings: entente compare shows "
        "the difference"
    )


def sweep_results(points: Sequence[SweepPoint]) -> list[dict[str, Any]]:
    """One object per point: values, runs, score over seeds, and gain over the first point. A seed is a cluster: its runs have
    the same positions and random numbers, so points are paired by seed."""
    return [_result(point, {} if point is points[0] else points[0].scores) for point in points]


def _result(point: SweepPoint, first: Mapping[int, float]) -> dict[str, Any]:
    gains = {seed: score - first[seed] for seed, score in point.scores.items() if seed in first}
    return {
        "settings": point.values,
        "runs": [run.run for run in point.runs],
        "score": _over_seeds(point.scores),
        "over_first": _over_seeds(gains),
        "seeds_to_show": clusters_to_show(list(gains.values())) if gains else None,
    }


def _over_seeds(by_seed: Mapping[int, float]) -> dict[str, Any] | None:
    if not by_seed:
        return None
    score = estimate(list(by_seed.values()), list(by_seed), SCORE_SEED)
    return {"mean": round(score.mean, 4), "interval": score.rounded(), "seeds": score.clusters}


def result_rows(results: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    def text(score: Mapping[str, Any] | None) -> str:
        return "" if score is None else f"{score['mean']:+.3f} {format_interval(score['interval'], '+.3f')}"

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


def _nested(name: str, value: Any) -> dict[str, Any]:
    return reduce(lambda inner, part: {part: inner}, reversed(name.split(".")), value)
