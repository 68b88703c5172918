"""The result of a sweep: one line for each setting, over its seeds.

A seed is a cluster: runs of one seed meet the same positions and luck in whatever they are scored on, so a setting is compared
with the first one seed by seed. Below `FEWEST_CLUSTERS` seeds there is no interval (`evaluation/intervals.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.intervals import FEWEST_CLUSTERS, Estimate, clusters_to_show, describe_shortage, estimate, format_interval
from pipeline.sweep import SweepRun, SweepState


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingResult:
    """What one setting of a sweep came to."""

    values: dict[str, Any]
    """Dotted name -> value of the settings that the sweep varies."""
    runs: tuple[str, ...]
    """Its runs, by seed."""
    steps: int
    """Steps after which it was scored last; 0 before the first score."""
    score: Estimate | None
    """Mean final score over seeds, centres; None before the first."""
    over_first: Estimate | None
    """Its score less that of the first setting, seed by seed after equal rungs; None for the first, or without a common seed."""
    seeds_to_show: int | None
    """Seeds needed to separate a difference of this size and spread from 0; None if that is unknown."""
    failed: dict[str, str]
    """Run -> why its training failed."""

    def to_json(self) -> dict[str, Any]:
        """As an entry of the command's JSON object."""

        def of(found: Estimate | None) -> dict[str, Any] | None:
            return found and {"mean": round(found.mean, 4), "interval": found.rounded(), "seeds": found.clusters}

        return {
            "settings": self.values,
            "runs": self.runs,
            "steps": self.steps,
            "score": of(self.score),
            "over_first": of(self.over_first),
            "seeds_to_show": self.seeds_to_show,
            "failed": self.failed,
        }


def sweep_results(state: SweepState) -> list[SettingResult]:
    """The results so far, in the order of the sweep's settings."""
    return [_result(state, point) for point in range(len(state.points))]


def result_rows(results: Sequence[SettingResult]) -> list[dict[str, str]]:
    """The table of results, column -> text, with the same columns in each row."""

    def text(found: Estimate | None) -> str:
        return "" if found is None else f"{found.mean:+.3f} {format_interval(found.interval, '+.3f')}"

    return [
        {name: str(value) for name, value in each.values.items()}
        | {
            "steps": str(each.steps),
            "seeds": f"{each.score.clusters if each.score else 0} of {len(each.runs)}",
            "score": text(each.score),
            "over the first": text(each.over_first),
            "seeds to show it": str(each.seeds_to_show or ""),
        }
        for each in results
    ]


def seeds_wanted(state: SweepState) -> str:
    """A sentence, where the sweep has too few seeds for an interval; else empty."""
    count = len(state.sweep.seeds)
    if count >= FEWEST_CLUSTERS:
        return ""
    return f"no setting can be called better than another: {describe_shortage(count, 'seeds')}"


def _result(state: SweepState, point: int) -> SettingResult:
    runs, first = state.of_point(point), state.of_point(0)
    done = [run for run in runs if state.scores[run.name]]
    rungs = max((len(state.scores[run.name]) for run in done), default=0)
    last = [run for run in done if len(state.scores[run.name]) == rungs]
    differences = {} if point == 0 else _over(state, runs, first)
    return SettingResult(
        values=state.points[point],
        runs=tuple(run.name for run in runs),
        steps=(state.sweep.rungs[rungs - 1] if state.sweep.rungs else runs[0].settings.steps) if rungs else 0,
        score=_estimate({run.settings.seed: state.scores[run.name][-1] for run in last}, runs[0]),
        over_first=_estimate(differences, runs[0]),
        seeds_to_show=clusters_to_show(list(differences.values())) if differences else None,
        failed={run.name: state.failed[run.name] for run in runs if run.name in state.failed},
    )


def _over(state: SweepState, runs: list[SweepRun], first: list[SweepRun]) -> dict[int, float]:
    """Seed -> score less that of the first setting, after the last rung that a run of both has done."""
    both = {run.settings.seed: (state.scores[run.name], state.scores[other.name]) for run, other in zip(runs, first, strict=True)}
    rungs = {seed: min(len(ours), len(theirs)) for seed, (ours, theirs) in both.items()}
    last = max(rungs.values())
    return {seed: ours[last - 1] - theirs[last - 1] for seed, (ours, theirs) in both.items() if last and rungs[seed] == last}


def _estimate(by_seed: dict[int, float], run: SweepRun) -> Estimate | None:
    evaluation = run.settings.evaluation
    return estimate(list(by_seed.values()), list(by_seed), evaluation.bootstrap, evaluation.seed) if by_seed else None
