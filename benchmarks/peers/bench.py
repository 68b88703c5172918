"""`peers`: figures against installed peers, theirs over ours in CPU seconds; above 1 ours costs less.

A peer that is missing, or not of the recorded version, leaves its figure out, with a sentence.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.outcome import Outcome, Target
from benchmarks.peers.environments import PEERS, missing_sentence
from pipeline.run_settings import RunSettings
from storage.runs import MODEL_FOLDER
from telemetry.errors import InputError
from telemetry.progress import reporter

TARGETS: Mapping[str, Target] = {figure: Target(at_least=1.0) for figure in PEERS}
QUICK_ROUNDS = 1
WHOLE_ROUNDS = 3
"""Most rounds of `trl_whole`, each of which trains two runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the measurements need."""

    settings: RunSettings
    """Settings of a run."""
    arguments: Sequence[str]
    """Arguments of `entente train` that give it these settings."""
    environments: Path
    """Folder of the peers' own environments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersOutcome(Outcome):
    """Figures, and those that are missing."""

    left_out: Mapping[str, str]
    """Figure -> why it was not measured, with the command that cures it."""

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
    if unknown := sorted(set(only) - set(PEERS)):
        raise InputError(f"The benchmark of peers measures no '{unknown[0]}', but {', '.join(PEERS)}.")
    return [figure for figure in PEERS if figure in only or not only]


def sort_out(wanted: Sequence[str], environments: Path) -> tuple[list[str], dict[str, str]]:
    """The figures whose peers are there, and the sentence of each other one.

    Raises:
        InputError: no peer is there.
    """
    left_out = {figure: why for figure in wanted if (why := missing_sentence(figure, environments)) is not None}
    there = [figure for figure in wanted if figure not in left_out]
    if not there:
        raise InputError("; ".join(left_out.values()))
    return there, left_out


def bench_peers(inputs: Inputs, *, only: Collection[str] = (), rounds: int = 5, quick: bool = False) -> PeersOutcome:
    """Measure the figures whose peers are installed.

    Args:
        only: names of figures; all of them if none is given.
        quick: fewer and smaller rounds, without scores. The figures then only show that everything works.

    Raises:
        InputError: an argument is wrong, or no peer is there.
        PeerError: a peer's program ended.
    """
    wanted, left_out = sort_out(check_wanted(only, rounds), inputs.environments)
    rounds = QUICK_ROUNDS if quick else rounds
    for sentence in left_out.values():
        reporter().say(sentence)
    measured = _Measurements(inputs, rounds=rounds, quick=quick)
    metrics: dict[str, float] = {}
    for part in (measured.trl_step, measured.trl_whole, measured.masks):
        metrics |= part(wanted)
    return PeersOutcome(
        benchmark="peers",
        metrics={figure: metrics[figure] for figure in wanted} | metrics,
        targets={figure: TARGETS[figure] for figure in wanted},
        left_out=left_out,
    )


class _Measurements:
    """The parts of the benchmark; each measures those of the wanted figures that are its own."""

    def __init__(self, inputs: Inputs, *, rounds: int, quick: bool) -> None:
        self._inputs, self._rounds, self._quick = inputs, rounds, quick
        self._settings = inputs.settings
        self._models, self._seed = self._settings.runs_root / MODEL_FOLDER, self._settings.seed

    def trl_step(self, wanted: Sequence[str]) -> dict[str, float]:
        """`trl_step`."""
        if "trl_step" not in wanted:
            return {}
        from benchmarks.laptop_run import record_rows
        from benchmarks.peers.trl_step import trl_step_figures

        recorded = record_rows(self._settings, self._inputs.arguments)
        return trl_step_figures(
            recorded, self._tiny_model(), self._settings.training, self._inputs.environments, rounds=self._rounds
        )

    def trl_whole(self, wanted: Sequence[str]) -> dict[str, float]:
        """`trl_whole`."""
        if "trl_whole" not in wanted:
            return {}
        from benchmarks.laptop_run import cache_of
        from benchmarks.peers.trl_whole import trl_whole_figures
        from state_cache.store import open_cache

        return trl_whole_figures(
            self._settings,
            self._inputs.arguments,
            open_cache(cache_of(self._settings)),
            self._tiny_model(),
            self._inputs.environments,
            rounds=min(self._rounds, WHOLE_ROUNDS),
            quick=self._quick,
        )

    def masks(self, wanted: Sequence[str]) -> dict[str, float]:
        """`xgrammar_mask`, `llguidance_mask`."""
        figures = [figure for figure in wanted if figure.endswith("_mask")]
        if not figures:
            return {}
        from benchmarks.peers.masks import mask_figures

        return mask_figures(figures, self._models, rounds=self._rounds, seed=self._seed, quick=self._quick)

    def _tiny_model(self) -> Path:
        from training.tiny_model import make_tiny_model

        return make_tiny_model(self._models, self._settings.tiny_model, prompts=self._settings.prompts)
