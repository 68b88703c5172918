"""Lets a state cache follow the policy: a share of its training positions gives way to boards that rollouts reached.

Promises: held-out positions stay as they are, and nothing that stands among them, by id or as a board, comes into the
training part; what comes in is spread over strata like everything else. Reads no file.
"""

import random
from collections import Counter
from collections.abc import Sequence

from game.snapshot import Snapshot, board_key
from state_cache.build import SNAPSHOTS_PER_GAME
from state_cache.settings import CacheSettings
from state_cache.strata import stratum_of
from telemetry.errors import InputError


def refresh(
    settings: CacheSettings, train: Sequence[Snapshot], held_out: Sequence[Snapshot], reached: Sequence[Snapshot]
) -> list[Snapshot]:
    """The new training part, as large as `train`: what is left of it, then the reached positions that came in.

    Fewer come in than the share where the run has not reached so many that fit the years and phases of `settings`.

    Raises:
        InputError: none fits.
    """
    rng = random.Random(f"refresh from {settings.from_run} up to {settings.from_groups} with seed {settings.seed}")
    fitting = _fitting(settings, [*train, *held_out], held_out, reached)
    coming = _evenly(fitting, round(settings.on_policy_share * len(train)), rng)
    if not coming:
        raise InputError(
            f"run '{settings.from_run}' has reached no new position of {settings.first_year} to {settings.last_year} in the "
            f"phases {', '.join(settings.phases)}: let it play on, or widen the years"
        )
    staying = sorted(rng.sample(range(len(train)), len(train) - len(coming)))
    return [*(train[place] for place in staying), *coming]


def _fitting(
    settings: CacheSettings, present: Sequence[Snapshot], held_out: Sequence[Snapshot], reached: Sequence[Snapshot]
) -> list[Snapshot]:
    """Reached positions of the right years and phases, each board once and none that is there already."""
    taken = {board_key(snapshot) for snapshot in present}
    kept_apart = {snapshot.snapshot_id for snapshot in held_out} | {snapshot.game_id for snapshot in held_out}
    fitting = []
    for snapshot in reached:
        wanted = snapshot.season + snapshot.phase_type in settings.phases
        in_years = settings.first_year <= snapshot.year <= settings.last_year
        if wanted and in_years and not kept_apart & {snapshot.snapshot_id, snapshot.game_id}:
            key = board_key(snapshot)
            if key not in taken:
                taken.add(key)
                fitting.append(snapshot)
    return fitting


def _evenly(fitting: list[Snapshot], count: int, rng: random.Random) -> list[Snapshot]:
    """At most `count`, out of the stratum that has given the fewest, and a few of each start group only."""
    lots = {snapshot.snapshot_id: rng.random() for snapshot in fitting}
    strata: dict[object, list[Snapshot]] = {}
    for snapshot in sorted(fitting, key=lambda snapshot: lots[snapshot.snapshot_id]):
        strata.setdefault(stratum_of(snapshot), []).append(snapshot)
    games: Counter[str] = Counter()
    chosen: list[Snapshot] = []
    while strata and len(chosen) < count:
        for stratum in sorted(strata, key=str):
            left = strata[stratum]
            while left and games[left[-1].game_id] >= SNAPSHOTS_PER_GAME:
                left.pop()
            if left and len(chosen) < count:
                chosen.append(left.pop())
                games[chosen[-1].game_id] += 1
            if not left:
                del strata[stratum]
    return chosen
