"""Simulated rollouts: stored start groups of an earlier run, published again under new numbers at a set rate.

The shards are real: their rows can be trained on, and name the policy version that was served when their start group began.
Each stretch is a Prefect task, as in a real run. The pace is that of one engine with a fixed rate of start groups, which serves
requests in order and does not work ahead. Simulated data is marked: tasks are named `replayed`, the rows' worker is `simulated`,
and shards name their origin. No token is drawn: `IdleEngine` refuses to generate.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from inference.engine import EngineStats
from pipeline.play import RolloutReport, publish_when_there_is_room, report_of, wait_for_ledger
from pipeline.resources import PRODUCER, Resources
from pipeline.rollout_source import Stretch
from pipeline.simulated_settings import SimulatedSettings
from records.generation import Generation, GenerationRequest
from records.policy_version import BASE, PolicyVersion
from records.rows import Decision, Ply
from storage.shards import coverage, publish_shard
from storage.stored_groups import StoredGroup
from telemetry.errors import EngineError
from telemetry.progress import reporter

WORKER = "simulated"
"""Name of the worker in the rows."""


class IdleEngine:
    """The engine of a run with simulated rollouts: it keeps the newest published version and draws nothing."""

    name = WORKER

    def __init__(self) -> None:
        self.policy = BASE

    async def start(self) -> None:
        """See `Engine.start`."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Raise EngineError; see `Engine.generate`."""
        raise EngineError(
            f"request {request.request_id}: a run with simulated rollouts has no engine; leave simulated.from_run out"
        )

    async def publish(self, policy: PolicyVersion) -> None:
        """See `Engine.publish`."""
        self.policy = policy

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        """See `Engine.retire`."""

    async def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return EngineStats(policy_version=self.policy.version)

    async def close(self) -> None:
        """See `Engine.close`."""


class Pace:
    """Begin and end times of start groups, in seconds of the caller's clock."""

    def __init__(self, rate: float) -> None:
        """`rate`: start groups per second."""
        self._rate, self._free_at = rate, float("-inf")

    def next(self, now: float) -> tuple[float, float]:
        """Begin and end of a start group that is requested at `now`."""
        begins = max(now, self._free_at)
        self._free_at = begins + 1 / self._rate
        return begins, self._free_at


class ReplayedSource:
    """A `RolloutSource` that replays `groups` over and over."""

    def __init__(
        self,
        resources: Resources,
        groups: Sequence[StoredGroup],
        settings: SimulatedSettings,
        *,
        timeout_s: float | None = None,
        retries: int = 0,
    ) -> None:
        """`resources.engine` is the `IdleEngine` that holds the newest version."""
        self.resources = resources
        self.groups = groups
        self.pace = Pace(settings.rate)
        self.provenance = resources.provenance | {"simulated_from": settings.from_run}
        self._task = replay_groups.with_options(timeout_seconds=timeout_s, retries=retries)
        reporter().say(
            f"rollouts are SIMULATED: {len(groups)} start groups of run '{settings.from_run}', {settings.rate:g} a second at most"
        )

    async def play(self, stretch: Stretch) -> RolloutReport:
        """See `RolloutSource.play`."""
        return await self._task(self, stretch.step, stretch.first_group, stretch.count, stretch.after)

    async def replay(self, number: int) -> tuple[list[Decision], list[Ply]]:
        """The rows of start group `number`, after its simulated duration."""
        begins, done = self.pace.next(time.monotonic())
        await asyncio.sleep(begins - time.monotonic())
        policy = getattr(self.resources.engine, "policy", BASE)
        await asyncio.sleep(done - time.monotonic())
        group = self.groups[number % len(self.groups)]
        return group.renumbered(PRODUCER, number, policy=policy, worker=WORKER)


@task(
    name="rollout",
    task_run_name="replayed-s{step}-g{first_group}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def replay_groups(
    source: ReplayedSource, step: int, first_group: int, count: int, after: Path | None = None
) -> RolloutReport:
    """Publish stored start groups as numbers `first_group` .. `first_group + count - 1`, like `roll_out_groups`."""
    began, resources = time.monotonic(), source.resources
    with resources.spans.span("rollout"):
        found = await asyncio.to_thread(coverage, resources.paths, PRODUCER, first_group, count)
        for first, stretch in found.missing:
            rows = await asyncio.gather(*(source.replay(number) for number in range(first, first + stretch)))
            await wait_for_ledger(after)
            await publish_when_there_is_room(
                partial(
                    publish_shard,
                    resources.paths,
                    PRODUCER,
                    first,
                    [row for decisions, _ in rows for row in decisions],
                    [ply for _, plies in rows for ply in plies],
                    source.provenance,
                    next_start_group=first + stretch,
                ),
                resources.full_disk_wait_s,
            )
        whole = found if not found.missing else await asyncio.to_thread(coverage, resources.paths, PRODUCER, first_group, count)
        report = await asyncio.to_thread(report_of, whole, count)
    return replace(report, set_aside=len(found.set_aside), seconds=time.monotonic() - began, engine_work=None)
