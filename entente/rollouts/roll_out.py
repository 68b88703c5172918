"""Rolls out start groups: plays all their forks concurrently and makes the rows and plies.

Every decision of the policy in a start group becomes a row. A group is never split. Rows of a failed fork have its status and
reason. Reward components are computed here: each covers the time from a decision to the same power's next decision in that fork,
or to the fork's end.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from entente.game.board import POWERS, Board
from entente.game.scores import Standing, components
from entente.game.snapshot import Snapshot
from entente.records.rows import Decision, Ply, decision_id
from entente.rollouts.deciders import CompletionSource, Decider
from entente.rollouts.fork import POLICY, ForkPlan, PlayedFork, Tokens, play_fork
from entente.rollouts.opponents import draw_opponents, opponents_text
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut:
    """Rows and plies of whole start groups."""

    decisions: list[Decision]
    plies: list[Ply]
    forks: int
    failed_forks: int
    failure: str = ""
    """Why the first failed fork failed; empty if none did."""


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
) -> RolledOut:
    """Play `settings.forks_per_group` forks of each group to the horizon.

    Args:
        producer: name of the producer of these groups; part of every id and seed.
        seed: the run's seed.
        on_group: called with the number of each start group when all its forks have ended.
        deciders: by name of their seat; needed for each version in `settings.opponents`, which has no 'league' any more.

    Raises:
        EngineError: more than `MAX_FAILED_SHARE` of the forks failed.
    """

    async def roll_out_group(group: StartGroup) -> tuple[StartGroup, list[PlayedFork]]:
        board = Board.restore(group.snapshot)
        board.prepare_forks()
        shared = f"{producer}/{seed}/{group.number}"
        seats = dict.fromkeys(POWERS, POLICY) | _draw_seats(shared, group, settings)
        forks = await asyncio.gather(
            *(
                play_fork(
                    ForkPlan(
                        name=f"{shared}/{fork}",
                        shared_name=shared,
                        seats=seats,
                        horizon_years=settings.horizon_years,
                        settled_years=SETTLED_YEARS,
                        last_winter=settings.last_winter,
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
        return group, forks

    played = await asyncio.gather(*(roll_out_group(group) for group in groups))
    forks = [fork for _, group_forks in played for fork in group_forks]
    failed = [fork for fork in forks if fork.status != "complete"]
    decisions: list[Decision] = []
    plies: list[Ply] = []
    for group, group_forks in played:
        for number, fork in enumerate(group_forks):
            decisions.extend(_rows(group, number, fork, settings, producer, seed))
            plies.extend(_plies(group, number, fork))
    rolled = RolledOut(
        decisions=decisions,
        plies=plies,
        forks=len(forks),
        failed_forks=len(failed),
        failure=failed[0].reason if failed else "",
    )
    check_failures(rolled)
    return rolled


def check_failures(played: RolledOut) -> None:
    """Check that not too many forks failed.

    Raises:
        EngineError: more than `MAX_FAILED_SHARE` of them did.
    """
    if played.failed_forks > MAX_FAILED_SHARE * played.forks:
        raise EngineError(f"{played.failed_forks} of {played.forks} forks failed; the first: {played.failure}")


def _rows(
    group: StartGroup, number: int, fork: PlayedFork, settings: RolloutSettings, producer: str, seed: int
) -> list[Decision]:
    """Rows of one fork, each with the reward components until the next decision of its power."""
    assert fork.end is not None
    following: dict[str, Standing] = {}
    rows = []
    seats = _draw_seats(f"{producer}/{seed}/{group.number}", group, settings)
    opponents = opponents_text(seats, by_seat=settings.opponents_by == "seat") if seats else POLICY
    for decision in reversed(fork.decisions):
        after = following.get(decision.power, fork.end)
        following[decision.power] = decision.before
        parts: dict[str, Any] = components(decision.before, after, decision.power)
        drawn, generation = decision.drawn, decision.drawn.generation
        rows.append(
            Decision(
                decision_id=decision_id(producer, group.number, number, decision.ply, decision.power),
                snapshot_id=group.snapshot.snapshot_id,
                start_group=group.number,
                fork=number,
                ply=decision.ply,
                power=decision.power,
                phase=decision.phase,
                game_id=group.snapshot.game_id,
                seed=drawn.seed,
                opponents=opponents,
                policy_version=generation.policy.version,
                adapter_hash=generation.policy.adapter_hash,
                worker=generation.worker,
                input_ids=np.concatenate([np.asarray(drawn.prompt_ids, np.int32), generation.token_ids]),
                prompt_len=len(drawn.prompt_ids),
                behaviour_logprobs=generation.logprobs,
                legal_ids=drawn.legal_ids,
                legal_offsets=drawn.legal_offsets,
                temperature=settings.temperature,
                orders=drawn.orders,
                orders_rejected=decision.rejected,
                status=fork.status,
                reason=fork.reason,
                ended=fork.ended,
                engine_ms=decision.engine_ms,
                **asdict(generation.cost),
                **parts,
            )
        )
    return rows[::-1]


def _plies(group: StartGroup, number: int, fork: PlayedFork) -> list[Ply]:
    return [
        Ply(
            start_group=group.number,
            fork=number,
            ply=played.ply,
            phase=played.phase,
            snapshot_id=played.snapshot_id,
            position=played.position,
            orders=json.dumps(played.orders),
            results=json.dumps(played.results),
        )
        for played in fork.plies
    ]


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
