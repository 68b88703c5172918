"""Reads several runs to compare them: settings, curves, scores on the same positions, time and tokens.

Every other run is compared with the first. Reads small files and ledgers but no tokens, so the size of a run hardly matters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entente.decoding.base_identity import FORM, identity_of
from entente.evaluation.paired import ScoreDifference, score_difference
from entente.evaluation.strength import POLICY
from entente.reports.read_run import different
from entente.reports.run_facts import RunFacts, read_facts
from entente.telemetry.errors import InputError
from entente.telemetry.setting_marks import leaves
from storage.json_files import kept_object
from storage.runs import RunPaths

MOST_RUNS = 8
"""Number of distinguishable colours."""
TOTALS: Mapping[str, tuple[str, Callable[[RunFacts], float]]] = {
    "steps": ("finished steps", lambda run: float(len(run.steps))),
    "wall_s": ("wall time of all steps, s", lambda run: run.total("time/step_s")),
    "step_s": ("median time of a step, s", lambda run: run.middle("time/step_s")),
    "wait_s": ("trainer wait per step, s", lambda run: run.middle("time/trainer_wait_s")),
    "decisions": ("decisions rolled out", lambda run: float(run.decisions)),
    "trained": ("decisions trained on", lambda run: run.total("train/decisions")),
    "prompt_tokens": ("prompt tokens", lambda run: run.total("rollout/prompt_tokens")),
    "cached_share": ("of them from the prefix cache", lambda run: run.share("rollout/cached_tokens", "rollout/prompt_tokens")),
    "completion_tokens": ("completion tokens", lambda run: run.total("rollout/completion_tokens")),
    "trained_tokens": ("tokens trained on", lambda run: run.total("train/tokens")),
}
"""Name -> (meaning, figure of a run; NaN if it was not measured)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    other: str
    label: str
    opponents: str
    years: int
    """Game years from each position to the score of the other."""
    versions: tuple[int, int]
    comparison: ScoreDifference | str
    """The other's gain minus the first's; or why the scores cannot be paired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    runs: Sequence[RunFacts]
    """The first is the baseline. Their `rows` are None."""
    settings: Sequence[tuple[str, list[Any]]]
    """Settings that differ: dotted name, value per run; None where a run lacks it. And "base model", the identity of its files:
    'tiny' or a folder may be another model in another run."""
    environment: Sequence[tuple[str, list[Any]]]
    """Differences of machines and versions; None where a run lacks a record."""
    paired: Sequence[Paired]
    """Scores by label that both runs have."""


def compare_runs(runs: Sequence[RunPaths]) -> Compared:
    if not 2 <= len(runs) <= MOST_RUNS:
        raise InputError(f"a comparison takes 2 to {MOST_RUNS} runs, and {len(runs)} {'is' if len(runs) == 1 else 'are'} given")
    facts = [read_facts(paths, rows=False) for paths in runs]
    first, others = facts[0], facts[1:]
    return Compared(
        runs=facts,
        settings=different({run.name: leaves(run.settings) | _base(paths) for run, paths in zip(facts, runs, strict=True)}),
        environment=different({run.name: run.environment or {} for run in facts}),
        paired=[pair for other in others for pair in _paired(first, other)],
    )


def _base(paths: RunPaths) -> dict[str, str]:
    hashes = {name: content for name, content in kept_object(paths.base).items() if name not in FORM}
    return {"base model": identity_of(hashes)} if hashes else {}


def _paired(first: RunFacts, other: RunFacts) -> list[Paired]:
    return [
        Paired(
            other=other.name,
            label=label,
            opponents=record.opponents,
            years=record.settings.horizon_years,
            versions=(first.scores[label].policy_version, record.policy_version),
            comparison=score_difference(first.scores[label], record),
        )
        for label, record in other.scores.items()
        if label in first.scores and record.player == POLICY
    ]
