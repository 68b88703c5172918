"""Rolls out start groups: plays all their forks concurrently and makes the rows and plies.

Every decision of the policy in a start group becomes a row. A group is never split.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from entente.game.board import POWERS, Board
from entente.game.snapshot import Snapshot
from entente.players.deciders import CompletionSource, Decider
from entente.players.opponents import draw_opponents, opponents_text
from entente.records.rows import Decision, Ply, decision_id
from entente.rollouts.fork import POLICY, ForkPlan, PlayedFork, Tokens, play_fork
from entente.rollouts.settings import RolloutSettings
from entente.telemetry.errors import EngineError

SETTLED_YEARS = 2
"""Game years without a change of centres after which a fork ends early, because little would still change."""
MAX_FAILED_SHARE = 0.25
"""Largest share of failed forks with which a rollout task succeeds: a few may meet a fault, more are one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGroup:
    """One snapshot to fork."""

    number: int
    """Unique per producer, ascending."""
    snapshot: Snapshot
    power: str | None
    """The power that the policy plays; None: all seven."""


async def roll_out(
    groups: Sequence[StartGroup],
    engine: CompletionSource,
    tokens: Tokens,
    settings: RolloutSettings,
    *,
    producer: str,
    seed: int,
    on_group: Callable[[int], None] | None = None,
    deciders: Mapping[str, Decider] | None = None,
) -> list[PlayedFork]:
    """Play `settings.forks_per_group` forks of each group to the horizon. Returns them by group and number, with their rows.

    Args:
        producer: name of the producer of these groups; part of every id and seed.
        seed: the run's seed.
        on_group: called with the number of each start group when all its forks have ended.
        deciders: by name of their seat; needed for each version in `settings.opponents`, which has no 'league' any more.

    Raises:
        EngineError: more than `MAX_FAILED_SHARE` of the forks failed.
    """

    async def roll_out_group(group: StartGroup) -> list[PlayedFork]:
        board = Board.restore(group.snapshot)
        board.prepare_forks()
        shared = f"{producer}/{seed}/{group.number}"
        seats = _draw_seats(shared, group, settings)
        forks = await asyncio.gather(
            *(
                play_fork(
                    ForkPlan(
                        name=f"{shared}/{fork}",
                        shared_name=shared,
                        seats=dict.fromkeys(POWERS, POLICY) | seats,
                        horizon_years=settings.horizon_years,
                        settled_years=SETTLED_YEARS,
                        temperature=settings.temperature,
                        snapshot_id=group.snapshot.snapshot_id,
                    ),
                    board.fork(),
                    engine,
                    tokens,
                    deciders=deciders,
                )
                for fork in range(settings.forks_per_group)
            )
        )
        board.release()
        if on_group is not None:
            on_group(group.number)
        opponents = opponents_text(seats, by_seat=settings.opponents_by == "seat") if seats else POLICY
        return [_as_rows(fork, group, number, producer, opponents) for number, fork in enumerate(forks)]

    forks = [fork for played in await asyncio.gather(*map(roll_out_group, groups)) for fork in played]
    _check_failures(forks)
    return forks


def _check_failures(forks: Sequence[PlayedFork]) -> None:
    """Check that not too many forks failed.

    Raises:
        EngineError: more than `MAX_FAILED_SHARE` of them did.
    """
    failed = [fork.reason for fork in forks if fork.status != "complete"]
    if len(failed) > MAX_FAILED_SHARE * len(forks):
        raise EngineError(f"{len(failed)} of {len(forks)} forks failed; the first: {failed[0]}")


def decisions_of(forks: Sequence[PlayedFork]) -> list[Decision]:
    """The decisions of all forks, in their order."""
    return [decision for fork in forks for decision in fork.decisions]


def plies_of(forks: Sequence[PlayedFork]) -> list[Ply]:
    """The plies of all forks, in their order."""
    return [ply for fork in forks for ply in fork.plies]


def _as_rows(fork: PlayedFork, group: StartGroup, number: int, producer: str, opponents: str) -> PlayedFork:
    """The fork, with its place in the run in all its rows."""
    place = {"start_group": group.number, "fork": number}
    fork.decisions = [
        replace(
            row,
            decision_id=decision_id(producer, group.number, number, row.ply, row.power),
            game_id=group.snapshot.game_id,
            opponents=opponents,
            **place,
        )
        for row in fork.decisions
    ]
    fork.plies = [replace(ply, **place) for ply in fork.plies]
    return fork


def _draw_seats(shared: str, group: StartGroup, settings: RolloutSettings) -> dict[str, str]:
    """The seats of the opponents in the start group named `shared`; none if the policy plays all powers."""
    others = [] if group.power is None else [power for power in POWERS if power != group.power]
    return draw_opponents(shared, settings.opponent_table, others, by_seat=settings.opponents_by == "seat")


def plan_start_groups(
    positions: Sequence[tuple[Snapshot, str]], first_number: int, settings: RolloutSettings
) -> list[StartGroup]:
    """Start groups for sampled (snapshot, power) pairs, numbered from `first_number`."""
    one_power = settings.policy_powers == "one"
    return [
        StartGroup(number=number, snapshot=snapshot, power=power if one_power else None)
        for number, (snapshot, power) in enumerate(positions, first_number)
    ]
