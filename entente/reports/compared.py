"""Reads several runs to compare them: settings, curves, scores on the same positions, time and tokens.

Every other run is compared with the first. Only small files and ledgers are read, no row's tokens, so runs of a million rows take
about as long as small ones. What cannot be read of a run is a sentence in its `troubles`. Nothing is written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entente.evaluation.paired import ScoreDifference, score_difference
from entente.evaluation.strength import POLICY
from entente.reports.read_run import different
from entente.reports.run_facts import RunFacts, read_facts
from entente.settings.layers import leaves
from entente.telemetry.errors import InputError
from storage.runs import RunPaths

MOST_RUNS = 8
"""Runs that a page can tell apart by colour."""
TOTALS: Mapping[str, tuple[str, Callable[[RunFacts], float]]] = {
    "steps": ("finished steps", lambda run: float(len(run.steps))),
    "wall_s": ("wall time of all steps, s", lambda run: run.total("time/step_s")),
    "step_s": ("median time of a step, s", lambda run: run.middle("time/step_s")),
    "wait_s": ("of it the trainer waited, s", lambda run: run.middle("time/trainer_wait_s")),
    "decisions": ("decisions rolled out", lambda run: float(run.decisions)),
    "trained": ("decisions trained on", lambda run: run.total("train/decisions")),
    "prompt_tokens": ("prompt tokens", lambda run: run.total("rollout/prompt_tokens")),
    "cached_share": ("of them from the prefix cache", lambda run: run.share("rollout/cached_tokens", "rollout/prompt_tokens")),
    "completion_tokens": ("completion tokens", lambda run: run.total("rollout/completion_tokens")),
    "trained_tokens": ("tokens trained on", lambda run: run.total("train/tokens")),
}
"""Name -> meaning, and the figure of a run; NaN if it was not measured."""


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

    runs: Sequence[RunFacts]
    """The first is the one that the others are compared with. Their rows were not read."""
    settings: Sequence[tuple[str, list[Any]]]
    """Settings that differ: dotted name, and the value of each run; None where a run lacks it."""
    environment: Sequence[tuple[str, list[Any]]]
    """What is recorded of machines and versions and differs; None where a run lacks it."""
    paired: Sequence[Paired]
    """Scores by label that both runs have: base, trained, trained_vs_mover ..."""


def compare_runs(runs: Sequence[RunPaths]) -> Compared:
    """Read and compare the runs."""
    if not 2 <= len(runs) <= MOST_RUNS:
        raise InputError(f"a comparison takes 2 to {MOST_RUNS} runs, and {len(runs)} {'is' if len(runs) == 1 else 'are'} given")
    found = [read_facts(paths, rows=False) for paths in runs]
    first, others = found[0], found[1:]
    return Compared(
        runs=found,
        settings=different({run.name: leaves(run.settings) for run in found}),
        environment=different({run.name: run.environment or {} for run in found}),
        paired=[pair for other in others for pair in _paired(first, other)],
    )


def _paired(first: RunFacts, other: RunFacts) -> list[Paired]:
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
