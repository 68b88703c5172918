"""Reads several runs to compare them: settings, curves, scores on the same positions, time and tokens.

Every other run is compared with the first. Only small files and ledgers are read, no row's tokens, so runs of a million rows take
about as long as small ones. What cannot be read of a run is a sentence in its `troubles`. Nothing is written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import pyarrow as pa

from evaluation.match_files import MatchRecord, read_matches
from evaluation.paired import ScoreDifference, score_difference
from evaluation.score_files import ScoreRecord, read_score, read_scores
from evaluation.strength import POLICY
from reports.read_figures import read_figures
from reports.return_curve import CurvePoint, return_curve
from reports.settings_tree import flat
from storage.json_files import read_object
from storage.ledger import read_ledger
from storage.lineages import lineage_at
from storage.runs import RunPaths
from telemetry.errors import DataError, InputError

MOST_RUNS = 8
"""Runs that a page can tell apart by colour."""
TOTALS: Mapping[str, tuple[str, Callable[["ComparedRun"], float]]] = {
    "steps": ("finished steps", lambda run: float(len(run.steps))),
    "wall_s": ("wall time of all steps, s", lambda run: run.total("time/step_s")),
    "step_s": ("median time of a step, s", lambda run: run.middle("time/step_s")),
    "wait_s": ("of it the trainer waited, s", lambda run: run.middle("time/trainer_wait_s")),
    "decisions": ("decisions rolled out", lambda run: run.total("rollout/decisions")),
    "trained": ("decisions trained on", lambda run: run.total("train/decisions")),
    "prompt_tokens": ("prompt tokens", lambda run: run.total("rollout/prompt_tokens")),
    "cached_share": ("of them from the prefix cache", lambda run: run.share("rollout/cached_tokens", "rollout/prompt_tokens")),
    "completion_tokens": ("completion tokens", lambda run: run.total("rollout/completion_tokens")),
    "trained_tokens": ("tokens trained on", lambda run: run.total("train/tokens")),
}
"""What a run took: name -> its meaning, and how it is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """What a comparison knows of one run."""

    name: str
    settings: Mapping[str, Any]
    """Dotted name -> value."""
    steps: Mapping[int, Mapping[str, float]]
    """Per finished step, its registered figures."""
    curve: Sequence[CurvePoint]
    """Mean return over its steps."""
    scores: Mapping[str, ScoreRecord]
    """By label."""
    track: Mapping[int, ScoreRecord]
    """Version -> its score against the first kind of opponents, of every version that was measured."""
    matches: Sequence[MatchRecord]
    environment: Mapping[str, str]
    """Its machine and versions; empty if they were not recorded."""
    troubles: Sequence[str]
    """Sentences about what could not be read."""

    def total(self, metric: str) -> float:
        """Sum over the steps; NaN if none has the metric."""
        found = [figures[metric] for figures in self.steps.values() if metric in figures]
        return sum(found) if found else float("nan")

    def middle(self, metric: str) -> float:
        """Median over the steps that have the metric; NaN if none has."""
        found = [figures[metric] for figures in self.steps.values() if metric in figures]
        return median(found) if found else float("nan")

    def share(self, part: str, whole: str) -> float:
        """One total as a share of another; NaN if that is 0."""
        return self.total(part) / self.total(whole) if self.total(whole) else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """One score of another run compared with the first run's."""

    other: str
    """Name of the other run."""
    label: str
    """Label of both scores."""
    opponents: str
    versions: tuple[int, int]
    """Measured versions, of the first run and of the other."""
    found: ScoreDifference | str
    """The other's gain less the first's; or why they cannot be paired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Several runs side by side."""

    runs: Sequence[ComparedRun]
    """The first is the one that the others are compared with."""
    settings: Sequence[tuple[str, list[Any]]]
    """Settings that differ: dotted name, and the value of each run; None where a run lacks it."""
    environment: Sequence[tuple[str, list[str]]]
    """What is recorded of machines and versions and differs; empty text where a run lacks it."""
    paired: Sequence[Paired]
    """Scores by label that both runs have: base, trained, trained_vs_mover ..."""
    by_version: Mapping[str, Mapping[int, ScoreDifference]]
    """Other run -> version -> its score less that of the same version of the first run."""
    matches: Sequence[MatchRecord]
    """Matches in which versions of two of the runs played."""


def compare_runs(runs: Sequence[RunPaths]) -> Compared:
    """Read and compare the runs.

    Raises:
        InputError: there are fewer than two or more than `MOST_RUNS`, or one is no run.
    """
    if not 2 <= len(runs) <= MOST_RUNS:
        raise InputError(f"a comparison takes 2 to {MOST_RUNS} runs, and {len(runs)} {'is' if len(runs) == 1 else 'are'} given")
    found = [_read(paths) for paths in runs]
    first, others = found[0], found[1:]
    return Compared(
        runs=found,
        settings=_different([run.settings for run in found], leave_out=("run", "runs_root")),
        environment=[
            (name, [str(value or "") for value in values]) for name, values in _different([r.environment for r in found])
        ],
        paired=[pair for other in others for pair in _paired(first, other)],
        by_version={other.name: _by_version(first, other) for other in others},
        matches=_between(found),
    )


def _read(paths: RunPaths) -> ComparedRun:
    settings, steps = read_figures(paths)
    troubles: list[str] = []

    def tried(read: Callable[[], Any], otherwise: Any, what: str) -> Any:
        try:
            return read()
        except DataError as error:
            troubles.append(f"{what} left out: {error}")
            return otherwise

    environment = (
        tried(lambda: read_object(paths.environment), {}, "Machine and versions are") if paths.environment.is_file() else {}
    )

    def rows_of(step: int) -> pa.Table | None:
        return read_ledger(paths, lineage_at(paths, step), step)

    return ComparedRun(
        name=paths.root.name,
        settings=flat(settings),
        steps=steps,
        curve=tried(
            lambda: return_curve(sorted(steps), lambda step: read_ledger(paths, lineage_at(paths, step), step)),
            [],
            "The curve is",
        ),
        scores=tried(lambda: read_scores(paths), {}, "Scores are"),
        track=tried(lambda: _track(paths), {}, "The track of strength is"),
        matches=tried(lambda: read_matches(paths.matches), [], "Matches are"),
        environment=environment,
        troubles=troubles,
    )


def _track(paths: RunPaths) -> dict[int, ScoreRecord]:
    labels = ["base", "trained", *(f"track/{file.stem}" for file in (paths.scores / "track").glob("*.json"))]
    records = [record for label in labels if (record := read_score(paths, label)) is not None]
    return {record.policy_version: record for record in sorted(records, key=lambda record: record.policy_version)}


def _different(trees: Sequence[Mapping[str, Any]], leave_out: Sequence[str] = ()) -> list[tuple[str, list[Any]]]:
    """The names whose values are not the same in all."""
    names = dict.fromkeys(name for tree in trees for name in tree if name not in leave_out)
    rows = [(name, [tree.get(name) for tree in trees]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]


def _paired(first: ComparedRun, other: ComparedRun) -> list[Paired]:
    """The policy's scores that both runs have under one label."""
    return [
        Paired(
            other=other.name,
            label=label,
            opponents=record.opponents,
            versions=(first.scores[label].policy_version, record.policy_version),
            found=score_difference(first.scores[label], record),
        )
        for label, record in other.scores.items()
        if label in first.scores and record.player == POLICY
    ]


def _by_version(first: ComparedRun, other: ComparedRun) -> dict[int, ScoreDifference]:
    """The versions above 0 that both runs measured in the same way."""
    both = {
        version: score_difference(first.track[version], record)
        for version, record in other.track.items()
        if version in first.track
    }
    return {version: found for version, found in both.items() if version and isinstance(found, ScoreDifference)}


def _between(runs: Sequence[ComparedRun]) -> list[MatchRecord]:
    """Matches in which versions of at least two of the runs were measured."""
    names = {run.name for run in runs}

    def meets(record: MatchRecord) -> bool:
        measured = {player.run for player in record.players if player.name in record.settings.players}
        return len(measured & names) > 1

    return [record for run in runs for record in run.matches if meets(record)]
