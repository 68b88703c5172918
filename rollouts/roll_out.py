"""Roll out start groups: every fork of every group at once, and the rows and plies that come of them.

Every decision of the policy in a start group becomes a row. A group is never split. Rows of a fork that failed say so, with the
reason. Reward components are computed here: each covers the time from a decision to the same power's next decision in that fork,
or to the fork's end.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from game.board import POWERS, Board
from game.scores import Standing, components
from game.snapshot import Snapshot
from inference.engine import Engine
from records.rows import Decision, Ply, decision_id
from rollouts.deciders import Decider
from rollouts.fork import POLICY, ForkPlan, PlayedFork, PlayedPly, Tokens, play_fork
from rollouts.seeds import dice
from rollouts.settings import RolloutSettings
from telemetry.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGroup:
    """One snapshot to be forked, and the power whose decisions the policy makes (None: all seven)."""

    number: int
    """Handed out once per producer, growing."""
    snapshot: Snapshot
    power: str | None
    branch_at: int = 0
    """Movement phases after which it branches off the newest start group before it that does not branch; 0: it begins at its own
    snapshot."""
    counted_from: str = ""
    """Phase from which its horizon is counted; empty: its snapshot's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut:
    """Rows and plies of whole start groups."""

    decisions: list[Decision]
    plies: list[Ply]
    forks: int
    failed_forks: int


OnGroup = Callable[[int], None]
"""Told the number of each start group as it becomes whole."""


async def roll_out(
    groups: Sequence[StartGroup],
    engine: Engine,
    tokens: Tokens,
    settings: RolloutSettings,
    *,
    producer: str,
    seed: int,
    on_group: OnGroup | None = None,
    frozen: Mapping[str, Decider] | None = None,
) -> RolledOut:
    """Play `settings.forks_per_group` forks of each group to the horizon.

    Args:
        frozen: who plays as `frozen_name(settings)`, needed where `settings.frozen_share` is above 0.
        producer: name of the producer that hands out these group numbers; part of every id and seed.
        seed: the run's seed.

    Raises:
        EngineError: more than `settings.max_failed_share` of the forks failed.
    """

    async def roll_out_group(group: StartGroup) -> tuple[StartGroup, list[PlayedFork]]:
        board = Board.restore(group.snapshot, settings.board_path)
        shared = f"{producer}/{seed}/{group.number}"
        others = opponents_of(shared, settings)
        seats = {power: POLICY if group.power in (None, power) else others for power in POWERS}
        forks = await asyncio.gather(
            *(
                play_fork(
                    ForkPlan(
                        name=f"{shared}/{fork}",
                        shared_name=shared,
                        seats=seats,
                        horizon_years=settings.horizon_years,
                        settled_years=settings.settled_years,
                        temperature=settings.temperature,
                        snapshot_id=group.snapshot.snapshot_id,
                        counted_from=group.counted_from,
                    ),
                    board.fork(),
                    engine,
                    tokens,
                    deciders=frozen,
                )
                for fork in range(settings.forks_per_group)
            )
        )
        board.release()
        if on_group is not None:
            on_group(group.number)
        return group, forks

    async def roll_out_family(family: Sequence[StartGroup]) -> list[tuple[StartGroup, list[PlayedFork]]]:
        first = await roll_out_group(family[0])
        rest = (roll_out_group(branched_off(group, *first, f"{producer}/{seed}/{group.number}")) for group in family[1:])
        return [first, *await asyncio.gather(*rest)]

    families = await asyncio.gather(*(roll_out_family(family) for family in _families(groups)))
    played = [group for family in families for group in family]
    forks = [fork for _, group_forks in played for fork in group_forks]
    failed = [fork for fork in forks if fork.status != "complete"]
    if len(failed) > settings.max_failed_share * len(forks):
        raise EngineError(f"{len(failed)} of {len(forks)} forks failed; the first: {failed[0].reason}")
    decisions: list[Decision] = []
    plies: list[Ply] = []
    for group, group_forks in played:
        for number, fork in enumerate(group_forks):
            decisions.extend(_rows(group, number, fork, settings, producer, seed))
            plies.extend(_plies(group, number, fork))
    return RolledOut(decisions=decisions, plies=plies, forks=len(forks), failed_forks=len(failed))


def _rows(
    group: StartGroup, number: int, fork: PlayedFork, settings: RolloutSettings, producer: str, seed: int
) -> list[Decision]:
    """Rows of one fork, each with the components of the time until its power's next decision."""
    assert fork.end is not None
    following: dict[str, Standing] = {}
    rows = []
    opponents = POLICY if group.power is None else opponents_of(f"{producer}/{seed}/{group.number}", settings)
    for decision in reversed(fork.decisions):
        after = following.get(decision.power, fork.end)
        following[decision.power] = decision.before
        parts: dict[str, Any] = components(decision.before, after, decision.power)
        answer, generation = decision.answer, decision.answer.generation
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
                seed=answer.seed,
                opponents=opponents,
                policy_version=generation.policy.version,
                adapter_hash=generation.policy.adapter_hash,
                worker=generation.worker,
                input_ids=np.concatenate([np.asarray(answer.prompt_ids, np.int32), generation.token_ids]),
                prompt_len=len(answer.prompt_ids),
                behaviour_logprobs=generation.logprobs,
                legal_ids=answer.legal_ids,
                legal_offsets=answer.legal_offsets,
                temperature=settings.temperature,
                orders=answer.orders,
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


def frozen_name(settings: RolloutSettings) -> str:
    """The seat, and the name in rows, of the frozen version: "policy:12"."""
    return f"{POLICY}:{settings.frozen_version}"


def opponents_of(shared: str, settings: RolloutSettings) -> str:
    """Who plays the other powers of the start group of this name: the frozen version, or one of the scripted players, by lot."""
    if settings.frozen_share and dice(shared, "frozen").random() < settings.frozen_share:
        return frozen_name(settings)
    names = settings.scripted_opponents
    return names[0] if len(names) == 1 else dice(shared, "opponents").choice(names)


def _families(groups: Sequence[StartGroup]) -> list[list[StartGroup]]:
    """Each start group that begins at its own snapshot, with those that branch off it."""
    families: list[list[StartGroup]] = []
    for group in groups:
        if group.branch_at:
            families[-1].append(group)
        else:
            families.append([group])
    return families


def branched_off(group: StartGroup, origin: StartGroup, forks: Sequence[PlayedFork], name: str) -> StartGroup:
    """`group`, to begin at the board that one of these forks of `origin` reached after its number of movement phases.

    Which fork is drawn by `name`, from those that played on from there: not by what became of it. Where none got so far,
    `group` begins at its own snapshot.
    """
    reached = [ply for fork in forks if fork.status == "complete" and (ply := _movement(fork, group.branch_at)) is not None]
    if not reached:
        return replace(group, branch_at=0)
    ply, start = dice(name, "branch").choice(reached), origin.snapshot
    board = Board.restore(replace(start, snapshot_id=ply.snapshot_id, position=ply.position, phase=ply.phase))
    source = f"branch of start group {origin.number}"
    return StartGroup(
        number=group.number,
        snapshot=board.snapshot(game_id=start.game_id, seed=start.seed, source=source),
        power=origin.power,
        branch_at=group.branch_at,
        counted_from=start.phase,
    )


def _movement(fork: PlayedFork, number: int) -> PlayedPly | None:
    """The fork's movement phase of this number after its first ply, if it gave orders in it."""
    later = [ply for ply in fork.plies[1:] if ply.phase.endswith("M") and ply.orders]
    return later[number - 1] if len(later) >= number else None


def plan_start_groups(
    positions: Sequence[tuple[Snapshot, str]], first_number: int, settings: RolloutSettings
) -> list[StartGroup]:
    """Start groups for sampled (snapshot, power) pairs, numbered from `first_number`.

    With branches, all but one of each family branch off that one, and have their position only for want of a better. Families
    begin at multiples of their size; one whose first is not among these has no branches.
    """
    alone = settings.policy_powers == "one"
    groups = []
    for index, (snapshot, power) in enumerate(positions):
        number = first_number + index
        place = number % settings.family
        groups.append(
            StartGroup(
                number=number,
                snapshot=snapshot,
                power=power if alone else None,
                branch_at=settings.branch_at[place - 1] if 0 < place <= index else 0,
            )
        )
    return groups
