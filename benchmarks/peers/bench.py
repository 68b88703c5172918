"""`peers`: figures against installed peers, theirs over ours in CPU seconds; above 1 ours costs less.

A peer that is not installed leaves its figure out, with a sentence.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.outcome import Outcome, Target
from pipeline.run_settings import RunSettings
from storage.runs import MODEL_FOLDER
from telemetry.errors import InputError
from telemetry.progress import reporter

FIGURES = ("trl_step", "xgrammar_mask")
OURS = "ours"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersOutcome(Outcome):
    """Figures, and those that are missing."""

    left_out: Mapping[str, str]
    """Figure -> why it was not measured, with what cures it."""

    def as_object(self) -> dict[str, Any]:
        """As `Outcome.as_object`, with what is missing."""
        return Outcome.as_object(self) | {"left_out": dict(self.left_out)}


def check_wanted(only: Collection[str], rounds: int) -> list[str]:
    """The figures to measure, in order: those of `only`, or all.

    Raises:
        InputError: `rounds` is below 1, or a name in `only` is unknown.
    """
    if rounds < 1:
        raise InputError(f"There is nothing to measure in {rounds} rounds: at least 1.")
    if unknown := sorted(set(only) - set(FIGURES)):
        raise InputError(f"The benchmark of peers measures no '{unknown[0]}', but {', '.join(FIGURES)}.")
    return [figure for figure in FIGURES if figure in only or not only]


def missing(figure: str, trl_python: Path) -> str | None:
    """Why a figure cannot be measured, with the cure; None if its peer is there."""
    if figure == "trl_step":
        cure = "docs/performance.md says how to make its environment"
        return None if trl_python.is_file() else f"trl_step is left out: there is no '{trl_python}'; {cure}"
    return None if find_spec("xgrammar") else f"{figure} is left out: xgrammar is not installed; `make setup-vllm` brings it"


def bench_peers(
    settings: RunSettings, arguments: Sequence[str], trl_python: Path, *, only: Collection[str] = (), rounds: int = 5
) -> PeersOutcome:
    """Measure the figures whose peers are installed.

    Args:
        settings: settings of a run.
        arguments: arguments of `entente train` that give it these settings.
        trl_python: the Python of the environment that has TRL.
        only: names of figures; all of them if none is given.

    Raises:
        InputError: an argument is wrong, or no peer is there.
    """
    wanted = check_wanted(only, rounds)
    left_out = {figure: why for figure in wanted if (why := missing(figure, trl_python)) is not None}
    if len(left_out) == len(wanted):
        raise InputError("; ".join(left_out.values()))
    for sentence in left_out.values():
        reporter().say(sentence)
    models, metrics = settings.runs_root / MODEL_FOLDER, dict[str, float]()
    if "trl_step" in wanted and "trl_step" not in left_out:
        from benchmarks.peers.trl_step import trl_step_figures

        metrics |= trl_step_figures(settings, arguments, models, trl_python, rounds=rounds)
    if "xgrammar_mask" in wanted and "xgrammar_mask" not in left_out:
        from benchmarks.peers.masks import mask_figures

        metrics |= mask_figures(models, rounds=rounds, seed=settings.seed)
    targets = {figure: Target(at_least=1.0) for figure in wanted if figure in metrics}
    return PeersOutcome(benchmark="peers", metrics=metrics, targets=targets, left_out=left_out)


def take_turns(arms: Mapping[str, Callable[[], float]], rounds: int, label: str) -> list[dict[str, float]]:
    """CPU seconds of each arm in each round; a first one warms up and is left out. Every second round is in reverse order."""
    measured = []
    for number in range(rounds + 1):
        names = list(arms) if number % 2 else list(arms)[::-1]
        spent = {name: arms[name]() for name in names}
        reporter().say(f"{label}, round {number} of {rounds}: " + ", ".join(f"{name} {spent[name]:.3g} s" for name in arms))
        measured.append(spent)
    return measured[1:]


def ratio(rounds: Sequence[Mapping[str, float]], theirs: str) -> float:
    """Median over the rounds of the CPU seconds of `theirs` over ours."""
    return median(spent[theirs] / spent[OURS] for spent in rounds)
