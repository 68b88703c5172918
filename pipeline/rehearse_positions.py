"""Which positions past steps would have drawn if another query had given them weights (`rollouts.sampling`).

Each step is looked at on its own, with what the start groups before it returned in fact. Both draws are made again from seed and
step, so the figures need no rollouts of the step itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from game.snapshot import POWERS, Snapshot
from pipeline.resources import PRODUCER
from pipeline.run_settings import RunSettings
from pipeline.shared_cache import find_shared_cache
from pipeline.start_positions import Past, first_unknown_group, position_weights
from state_cache.sampling import sample_start_positions
from state_cache.store import open_cache
from storage.runs import RunPaths
from telemetry.errors import InputError

if TYPE_CHECKING:
    from storage.learnable import PastGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPositions:
    """The positions that a step draws. The means are over start groups."""

    start_groups: int
    positions: int
    """Different ones."""
    year: float
    """Mean game year."""
    centres: float
    """Mean number of centres of the power that the policy plays."""
    spread: float | None
    """Mean of what past start groups there had as their spread, where there were some; None: nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedDraw:
    """One step: what it drew, and what it would have drawn by the query."""

    step: int
    positions: int
    """Positions of the state cache to train on."""
    possible: int
    """Positions to which the query gives a weight above 0."""
    in_fact: DrawnPositions
    by_query: DrawnPositions
    both: int
    """Positions that are in both draws."""


def rehearse_positions(
    paths: RunPaths, query: str, steps: Iterable[int], settings_at: Callable[[int], RunSettings], past: Past
) -> list[RehearsedDraw]:
    """Let a query give the weights for past steps; returns them in the order of `steps`.

    Raises:
        InputError: the query breaks a rule, or the run's state cache is gone.
    """
    found, opened = [], dict[Path, Sequence[Snapshot]]()
    for step in steps:
        settings = settings_at(step)
        rollouts, folder = settings.rollouts, find_shared_cache(settings.runs_root, settings.cache)
        if folder is None:
            raise InputError(f"the state cache of run '{settings.run}' is gone: build it again with `entente cache build`")
        if folder not in opened:
            opened[folder] = open_cache(folder, settings.cache).train
        train = opened[folder]
        before = partial(first_unknown_group, paths, rollouts.start_groups, step, settings.storage.max_policy_lag)
        known = past.before(PRODUCER, before())
        weights = {name: position_weights(name, train, step, past, before) for name in (rollouts.sampling, query)}
        drawn = {
            name: sample_start_positions(train, rollouts.start_groups, settings.seed, step, sampling=name, weights=weights[name])
            for name in weights
        }
        ids = [{snapshot.snapshot_id for snapshot, _ in drawn[name]} for name in (rollouts.sampling, query)]
        found.append(
            RehearsedDraw(
                step=step,
                positions=len(train),
                possible=sum(map(bool, weights[query])) if weights[query] else len(train),
                in_fact=_described(drawn[rollouts.sampling], known),
                by_query=_described(drawn[query], known),
                both=len(ids[0] & ids[1]),
            )
        )
    return found


def _described(drawn: Sequence[tuple[Snapshot, str]], known: "Mapping[str, PastGroups]") -> DrawnPositions:
    spreads = [known[snapshot.snapshot_id].spread for snapshot, _ in drawn if snapshot.snapshot_id in known]
    return DrawnPositions(
        start_groups=len(drawn),
        positions=len({snapshot.snapshot_id for snapshot, _ in drawn}),
        year=fmean(snapshot.year for snapshot, _ in drawn),
        centres=fmean(snapshot.centres[POWERS.index(power)] for snapshot, power in drawn),
        spread=fmean(spreads) if spreads else None,
    )
