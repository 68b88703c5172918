"""The rollout task: some start groups of a step, played and published as one shard."""

import asyncio
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from rollouts.roll_out import RolledOut, plan_start_groups, roll_out
from state_cache.sampling import sample_start_positions
from storage.shards import publish_shard, shard_path
from tasks.resources import PRODUCER, Resources
from telemetry.progress import reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """What a rollout task did."""

    start_groups: int
    decisions: int
    failed_forks: int
    orders_rejected: int
    seconds: float
    """Wall time of playing, publishing included."""
    queue_ms: float
    """Median over decisions."""
    generate_ms: float
    """Median over decisions."""
    engine_ms: float
    """Median over decisions: the game engine at their ply."""


@task(
    name="rollout",
    task_run_name="rollout-s{step}-g{first_group}",
    cache_policy=NO_CACHE,
    persist_result=False,
    tags=["rollout"],
)
async def roll_out_groups(resources: Resources, step: int, first_group: int, count: int) -> RolloutReport:
    """Play start groups `first_group` .. `first_group + count - 1` of `step` and publish their shard.

    A retry after the shard was published finds it and plays nothing.
    """
    if shard_path(resources.paths, PRODUCER, first_group).exists():
        return _report(None, count, 0.0)
    began = time.monotonic()
    with resources.spans.span("rollout"):
        settings, first_of_step = resources.rollouts, (step - 1) * resources.rollouts.start_groups
        positions = sample_start_positions(resources.cache.train, settings.start_groups, resources.seed, step)
        mine = positions[first_group - first_of_step : first_group - first_of_step + count]
        done: list[int] = []

        def on_group(number: int) -> None:
            done.append(number)
            reporter().stage(f"rollout {step}", len(done), count)

        played = await resources.host.run(
            roll_out(
                plan_start_groups(mine, first_group, settings),
                resources.engine,
                resources.tokens,
                settings,
                producer=PRODUCER,
                seed=resources.seed,
                on_group=on_group,
            )
        )
        publish = partial(publish_shard, next_start_group=first_group + count)
        await asyncio.to_thread(
            publish,
            resources.paths,
            PRODUCER,
            first_group,
            played.decisions,
            played.plies,
            resources.provenance,
        )
    return _report(played, count, time.monotonic() - began)


def _report(played: RolledOut | None, count: int, seconds: float) -> RolloutReport:
    rows = played.decisions if played else []
    medians = [
        float(np.median([getattr(row, name) for row in rows])) if rows else 0.0
        for name in ("queue_ms", "generate_ms", "engine_ms")
    ]
    return RolloutReport(
        start_groups=count,
        decisions=len(rows),
        failed_forks=played.failed_forks if played else 0,
        orders_rejected=sum(row.orders_rejected for row in rows),
        seconds=seconds,
        queue_ms=medians[0],
        generate_ms=medians[1],
        engine_ms=medians[2],
    )
