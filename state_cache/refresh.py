"""Refreshes a state cache: a share of its training positions is replaced by boards that rollouts reached.

Held-out positions stay the same. A reached position is excluded if a held-out position has its id, board or game. The reached
positions are spread over strata. This module reads no file.
"""

import random
from collections import Counter
from collections.abc import Sequence

from entente.game.snapshot import Snapshot, board_key
from entente.telemetry.errors import InputError
from state_cache.build import SNAPSHOTS_PER_GAME
from state_cache.sampling import stratum_of
from state_cache.settings import CacheSettings


def refresh(
    settings: CacheSettings, train: Sequence[Snapshot], held_out: Sequence[Snapshot], reached: Sequence[Snapshot]
) -> list[Snapshot]:
    """The new training positions, as many as `train`: the positions that stay, then the reached positions.

    There are fewer reached positions than the share asks for if too few were reached in the years and phases of `settings`.

    Args:
        settings: of the refreshed cache: the share, the run, the years and phases.
        reached: positions of the run's rollouts, in any number.

    Raises:
        InputError: no reached position fits.
    """
    rng = random.Random(f"refresh from {settings.from_run} up to {settings.from_groups} with seed {settings.seed}")
    fitting = _select_fitting(settings, [*train, *held_out], held_out, reached)
    new = _choose_evenly(fitting, round(settings.on_policy_share * len(train)), rng)
    if not new:
        raise InputError(
            f"run '{settings.from_run}' has reached no new position of {settings.first_year} to {settings.last_year} in the "
            f"phases {', '.join(settings.phases)}: continue the run, begin one with rollouts.last_winter, whose forks reach the "
            "spring after their last winter, or widen the years"
        )
    kept = sorted(rng.sample(range(len(train)), len(train) - len(new)))
    return [*(train[index] for index in kept), *new]


def _select_fitting(
    settings: CacheSettings, present: Sequence[Snapshot], held_out: Sequence[Snapshot], reached: Sequence[Snapshot]
) -> list[Snapshot]:
    """Reached positions in the right years and phases, one per board, without boards that the cache already has."""
    known_boards = {board_key(snapshot) for snapshot in present}
    excluded = {snapshot.snapshot_id for snapshot in held_out} | {snapshot.game_id for snapshot in held_out}
    fitting = []
    for snapshot in reached:
        in_phases = snapshot.season + snapshot.phase_type in settings.phases
        in_years = settings.first_year <= snapshot.year <= settings.last_year
        if in_phases and in_years and not excluded & {snapshot.snapshot_id, snapshot.game_id}:
            key = board_key(snapshot)
            if key not in known_boards:
                known_boards.add(key)
                fitting.append(snapshot)
    return fitting


def _choose_evenly(fitting: list[Snapshot], count: int, rng: random.Random) -> list[Snapshot]:
    """At most `count` positions, round by round over the strata, and at most SNAPSHOTS_PER_GAME of each fork."""
    ranks = {snapshot.snapshot_id: rng.random() for snapshot in fitting}
    strata: dict[object, list[Snapshot]] = {}
    for snapshot in sorted(fitting, key=lambda snapshot: ranks[snapshot.snapshot_id]):
        strata.setdefault(stratum_of(snapshot), []).append(snapshot)
    chosen_per_fork: Counter[str] = Counter()
    chosen: list[Snapshot] = []
    while strata and len(chosen) < count:
        for stratum in sorted(strata, key=str):
            remaining = strata[stratum]
            while remaining and chosen_per_fork[remaining[-1].game_id] >= SNAPSHOTS_PER_GAME:
                remaining.pop()
            if remaining and len(chosen) < count:
                chosen.append(remaining.pop())
                chosen_per_fork[chosen[-1].game_id] += 1
            if not remaining:
                del strata[stratum]
    return chosen
