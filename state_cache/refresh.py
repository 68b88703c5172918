"""Refreshes a state cache: replaces a share of its training positions by boards that rollouts reached. Reads no file.

Held-out positions stay; reached positions that share id, board or game with one are excluded, the others spread over strata. A
fork ends before its last winter, so the cache's scripted players order those adjustments to reach the next spring; otherwise
forks of one year would only reach springs without a change of centres.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from entente.game.board import POWERS, Board
from entente.game.scripted import player
from entente.game.snapshot import Snapshot, board_key
from entente.telemetry.errors import InputError
from state_cache.build import SNAPSHOTS_PER_GAME
from state_cache.sampling import stratum_of
from state_cache.settings import CacheSettings


def refresh(
    settings: CacheSettings, train: Sequence[Snapshot], held_out: Sequence[Snapshot], reached: Sequence[Snapshot]
) -> list[Snapshot]:
    """The new training positions, as many as `train`: first those that stay, then reached ones.

    There are fewer reached ones than `settings.share` asks for if too few lie in the years and phases of `settings`, those of
    the refreshed cache. Raises InputError if none fits.
    """
    rng = random.Random(f"refresh from {settings.from_run} up to {settings.from_groups} with seed {settings.seed}")
    allowed = _without_held_out(held_out, reached)
    springs = _last_springs(settings, allowed) if "SM" in settings.phases else []
    fitting = _select_fitting(settings, [*train, *held_out], [*allowed, *springs])
    new = _choose_evenly(fitting, max(1, round(settings.on_policy_share * len(train))), rng)
    if not new:
        raise InputError(
            f"run '{settings.from_run}' has reached no new position of {settings.first_year} to {settings.last_year} in the "
            f"phases {', '.join(settings.phases)}: continue the run, or widen the years"
        )
    kept = sorted(rng.sample(range(len(train)), len(train) - len(new)))
    return [*(train[index] for index in kept), *new]


def _without_held_out(held_out: Sequence[Snapshot], reached: Sequence[Snapshot]) -> list[Snapshot]:
    names = {snapshot.snapshot_id for snapshot in held_out} | {snapshot.game_id for snapshot in held_out}
    boards = {board_key(snapshot) for snapshot in held_out}
    return [each for each in reached if not names & {each.snapshot_id, each.game_id} and board_key(each) not in boards]


def _last_springs(settings: CacheSettings, reached: Sequence[Snapshot]) -> list[Snapshot]:
    last_years: dict[str, int] = {}
    for snapshot in reached:
        last_years[snapshot.game_id] = max(snapshot.year, last_years.get(snapshot.game_id, 0))
    winters = (snapshot for snapshot in reached if snapshot.phase_type == "A" and snapshot.year == last_years[snapshot.game_id])
    return [_after_adjustments(settings, winter) for winter in winters]


def _after_adjustments(settings: CacheSettings, winter: Snapshot) -> Snapshot:
    """The position after a winter in which the cache's scripted players order the adjustments; the position seeds them."""
    rng, board = random.Random(winter.snapshot_id), Board.restore(winter)
    seats = {power: player(rng.choice(settings.players)) for power in POWERS}
    board.step({power: seats[power](legal, rng, board) for power, legal in board.legal_orders().items()})
    after = board.snapshot(game_id=winter.game_id, seed=winter.seed, source=winter.source)
    board.release()
    return replace(after, power=winter.power)


def _select_fitting(settings: CacheSettings, present: Sequence[Snapshot], reached: Sequence[Snapshot]) -> list[Snapshot]:
    known_boards = {board_key(snapshot) for snapshot in present}
    fitting = []
    for snapshot in reached:
        in_phases = snapshot.season + snapshot.phase_type in settings.phases
        in_years = settings.first_year <= snapshot.year <= settings.last_year
        if in_phases and in_years and (key := board_key(snapshot)) not in known_boards:
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
