"""Plays start groups: all forks of a group from one board, and the rows of several groups as one shard.

Start groups with a shard are never played again, whichever process published it. A damaged shard is set aside, and its start
groups are replayed. Every decision of the policy in a start group becomes a row; a group is never split.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from entente.game.board import POWERS, Board
from entente.game.snapshot import Snapshot
from entente.players.opponents import POLICY, opponents_text, sample_opponents
from entente.players.policy import Decider, PolicyPlayer
from entente.players.shared_search import search_opponents
from entente.records.rows import Decision, PlayedPhase
from entente.rollouts.figures import Figures, rollout_figures
from entente.rollouts.fork import ForkPlan, PlayedFork, play_fork
from entente.rollouts.resources import PROBE, RolloutResources
from entente.rollouts.settings import RolloutSettings
from entente.telemetry.errors import EngineError, disk_full
from entente.telemetry.progress import reporter
from state_cache.sampling import sample_start_positions
from storage.files import file_marks
from storage.shards import LOCAL_PRODUCER, Coverage, Shard, coverage, publish_shard

T = TypeVar("T")

SETTLED_YEARS = 2
"""Game years without a change of centres after which a fork ends early, because little more would change."""
MAX_FAILED_SHARE = 0.25
"""Largest fraction of failed forks at which a rollout task still succeeds: more suggest a common cause."""
_RETRY_S = 2.0
FULL_DISK_WAIT_S = 60.0
"""Seconds that finished rollouts wait for space on a full disk before the run stops; it can be resumed."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGroup:
    number: int
    """Unique per producer, ascending."""
    snapshot: Snapshot
    power: str | None
    """The power that the policy plays; None: all seven."""


@dataclass(frozen=True, slots=True, order=True)
class GroupRange:
    """Consecutive start groups that one rollout task plays. All start from the positions of one step."""

    first_group: int
    count: int
    step: int
    """The step whose positions they start from. Any step may train on the rows."""
    after: Path | None = None
    """Ledger of a step. The shard is published only once this file exists, so it cannot change what that step selects."""


async def play_groups(resources: RolloutResources, group_range: GroupRange) -> Figures:
    """Play `group_range`, publish its shard and return its figures. A retry after that plays nothing."""
    with resources.spans.span("rollout"):
        first_of_step = (group_range.step - 1) * resources.rollouts.start_groups
        settings, stage = resources.rollouts.at(group_range.step), f"rollout {group_range.step}"
        sampled = resources.cache.train, settings.start_groups, resources.seed, group_range.step
        positions = await asyncio.to_thread(sample_start_positions, *sampled, sampling=settings.sampling)
        mine = positions[group_range.first_group - first_of_step :][: group_range.count]
        covered = await play_missing(resources, stage, LOCAL_PRODUCER, mine, group_range.first_group, settings, group_range.after)
        return await asyncio.to_thread(rollout_figures, covered, group_range.count, resources.tokens.thinking)


async def play_missing(
    resources: RolloutResources,
    stage: str,
    producer: str,
    positions: list[tuple[Snapshot, str]],
    first_group: int,
    rollouts: RolloutSettings,
    after: Path | None = None,
) -> Coverage:
    """Play the producer's start groups from `first_group` on, one per position, except those already published.

    Args:
        positions: (snapshot, power that the policy plays) pairs.
        after: publish only once this ledger exists.
    """
    count = len(positions)
    covered = await asyncio.to_thread(coverage, resources.paths, producer, first_group, count)
    for first, size in covered.missing:
        mine = positions[first - first_group :][:size]
        await _play_groups(resources, stage, producer, mine, first, rollouts, after)
    if covered.missing:
        whole = await asyncio.to_thread(coverage, resources.paths, producer, first_group, count)
        return replace(whole, set_aside=covered.set_aside)
    return covered


async def play_probe(resources: RolloutResources, version: int) -> None:
    """Play start groups with the trainer's version, to compare engine and trainer where rollouts run ahead: at a resume, and with
    a buffer at each comparison that finds no rows of this version. They have one fork, so no advantage, and no step selects
    them: training does not depend on where a run was resumed."""
    alone = resources.rollouts.model_copy(update={"forks_per_group": 1})
    count = resources.rollouts.forks_per_group
    with resources.spans.span("rollout"):
        positions = sample_start_positions(resources.cache.train, count, resources.seed, version)
        await play_missing(resources, "probe", PROBE, positions, version * count, alone)


async def _play_groups(
    resources: RolloutResources,
    stage: str,
    producer: str,
    positions: list[tuple[Snapshot, str]],
    first_group: int,
    rollouts: RolloutSettings,
    after: Path | None,
) -> None:
    done: list[int] = []
    settings = await asyncio.to_thread(resources.league.settings_for, rollouts, producer, first_group, resources.past.run_version)

    def on_group(number: int) -> None:
        done.append(number)
        reporter().stage(stage, len(done), len(positions))

    groups = plan_start_groups(positions, first_group, settings)
    forks = await resources.host.run(_roll_out(resources, groups, settings, producer, on_group))
    while after is not None and not await asyncio.to_thread(after.exists):
        await asyncio.sleep(_POLL_S)
    if resources.started not in (None, await asyncio.to_thread(file_marks, resources.paths.settings)):
        run = resources.paths.root.name
        raise EngineError(f"run '{run}' was removed or started again meanwhile: it would get rows of its former start")
    publish = partial(
        publish_shard,
        resources.paths,
        producer,
        first_group,
        decisions_of(forks),
        phases_of(forks),
        resources.provenance,
        next_start_group=first_group + len(positions),
        failed_without_rows=[fork.reason for fork in forks if fork.status != "complete" and not fork.decisions],
    )
    await publish_when_there_is_room(publish, FULL_DISK_WAIT_S)


async def _roll_out(
    resources: RolloutResources,
    groups: Sequence[StartGroup],
    settings: RolloutSettings,
    producer: str,
    on_group: Callable[[int], None],
) -> list[PlayedFork]:
    """Play with empty prefix caches: otherwise the last bits of log-probabilities would depend on earlier samples and resumes."""
    async with resources.past.served(settings.opponent_versions) as versions:
        policy = {POLICY: PolicyPlayer(resources.engine, resources.tokens)}
        searching = search_opponents(settings.searching_opponents, resources.engine, resources.tokens)
        players = {**policy, **versions, **searching, **resources.endpoints.deciders}
        await resources.engine.forget_prefixes()
        return await roll_out(groups, players, settings, producer=producer, seed=resources.seed, on_group=on_group)


async def publish_when_there_is_room(publish: Callable[[], Shard], wait_s: float) -> Shard:
    """Call `publish`, and retry while the disk is full; raises OSError for other failures, or after `wait_s` seconds."""
    until = time.monotonic() + wait_s
    while True:
        try:
            return await asyncio.to_thread(publish)
        except OSError as error:
            full, left = disk_full(error), until - time.monotonic()
            if full is None or left <= 0:
                raise
            reporter().say(f"{full}; rollouts pause for at most {left:.0f} s")
            await asyncio.sleep(min(_RETRY_S, left))


def plan_start_groups(
    positions: Sequence[tuple[Snapshot, str]], first_number: int, settings: RolloutSettings
) -> list[StartGroup]:
    one_power = settings.policy_powers == "one"
    return [
        StartGroup(number=number, snapshot=snapshot, power=power if one_power else None)
        for number, (snapshot, power) in enumerate(positions, first_number)
    ]


async def roll_out(
    groups: Sequence[StartGroup],
    players: Mapping[str, Decider],
    settings: RolloutSettings,
    *,
    producer: str,
    seed: int,
    on_group: Callable[[int], None] = lambda number: None,
) -> list[PlayedFork]:
    """Play `settings.forks_per_group` forks of each group to the horizon; returns them with rows, sorted by group and number.

    Args:
        players: by seat name: the policy, and each version in `settings.opponents`, with 'league' resolved.
        producer: part of every id and seed.
        on_group: called with the number of each start group when all its forks have ended.

    Raises:
        EngineError: more than `MAX_FAILED_SHARE` of the forks failed.
        InputError: a user's bot failed, or the token budget of the endpoints is spent.
    """

    async def roll_out_group(group: StartGroup) -> list[PlayedFork]:
        board = Board.restore(group.snapshot)
        board.prepare_forks()
        shared = f"{producer}/{seed}/{group.number}"
        seats = _sample_seats(shared, group, settings)
        by_seat = settings.opponents_by == "seat"
        plan = ForkPlan(
            name=shared,
            shared_name=shared,
            seats=dict.fromkeys(POWERS, POLICY) | seats,
            horizon_years=settings.horizon_years,
            settled_years=SETTLED_YEARS,
            temperature=settings.temperature,
            snapshot_id=group.snapshot.snapshot_id,
            producer=producer,
            start_group=group.number,
            game_id=group.snapshot.game_id,
            opponents=opponents_text(seats, by_seat=by_seat) if seats else POLICY,
        )
        plans = [replace(plan, name=f"{shared}/{fork}", fork=fork) for fork in range(settings.forks_per_group)]
        forks = await _all_or_none([play_fork(each, board.fork(), players) for each in plans])
        board.release()
        on_group(group.number)
        return forks

    forks = [fork for played in await _all_or_none(list(map(roll_out_group, groups))) for fork in played]
    _check_failures(forks)
    return forks


async def _all_or_none(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results; if one raises, the others are cancelled, so that a retry does not repeat requests in flight."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _check_failures(forks: Sequence[PlayedFork]) -> None:
    failed = [fork.reason for fork in forks if fork.status != "complete"]
    if len(failed) > MAX_FAILED_SHARE * len(forks):
        raise EngineError(f"{len(failed)} of {len(forks)} forks failed; the first: {failed[0]}")


def decisions_of(forks: Sequence[PlayedFork]) -> list[Decision]:
    return [decision for fork in forks for decision in fork.decisions]


def phases_of(forks: Sequence[PlayedFork]) -> list[PlayedPhase]:
    return [phase_row for fork in forks for phase_row in fork.phases]


def _sample_seats(shared: str, group: StartGroup, settings: RolloutSettings) -> dict[str, str]:
    others = [] if group.power is None else [power for power in POWERS if power != group.power]
    return sample_opponents(shared, settings.opponent_table, others, by_seat=settings.opponents_by == "seat")
