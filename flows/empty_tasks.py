"""Flow: rollout tasks that roll out nothing, to measure what Prefect takes for a task; `entente bench orchestration` runs it.

    python -m flows.empty_tasks COUNT IN_FLIGHT

Promise: tasks are begun, named, limited and handed their resources as those of a training run are, so many in flight at a time;
only their work is left out. The last line is one JSON object.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from flows.run_settings import PipelineSettings
from game.snapshot import Snapshot
from rollouts.settings import RolloutSettings
from state_cache.settings import CacheSettings
from state_cache.store import StateCache
from storage.runs import RunPaths
from tasks.resources import Playing

WARM_UP = 8
"""Tasks before the clock starts: the first ones import and connect."""


@task(
    name="rollout",
    task_run_name="empty-s{step}-g{first_group}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def play_nothing(resources: Playing, step: int, first_group: int, count: int) -> int:
    """In the place of `roll_out_groups`."""
    return count


@flow(name="empty-tasks", flow_run_name="empty-tasks-{count}")
async def empty_tasks(count: int, in_flight: int) -> dict[str, Any]:
    """Run `count` tasks, after a few to warm up."""
    pipeline = PipelineSettings()
    work = play_nothing.with_options(
        timeout_seconds=pipeline.rollout_timeout_s,
        retries=pipeline.rollout_retries,
        retry_delay_seconds=1,
        retry_jitter_factor=1,
    )
    playing = _playing()
    for number in range(WARM_UP):
        await work(playing, 0, number, 1)
    began, cpu = time.monotonic(), time.process_time()
    busy: set[asyncio.Task[int]] = set()
    for number in range(count):
        if len(busy) >= in_flight:
            _, busy = await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
        busy.add(asyncio.create_task(work(playing, number // 8 + 1, number, 1)))
    await asyncio.gather(*busy)
    return {
        "tasks": count,
        "all_tasks": count + WARM_UP,
        "seconds": time.monotonic() - began,
        "cpu_s": time.process_time() - cpu,
        "flow_run": str(flow_run.id),
        "last_task_at": time.time(),
    }


def _playing() -> Playing:
    """Resources of a run's size, with nothing behind them: what a task is given also costs."""
    nothing: Any = None
    snapshots = tuple(
        Snapshot(
            snapshot_id=f"{number:016x}",
            phase="S1903M",
            year=1903,
            season="S",
            phase_type="M",
            centres=(5,) * 7,
            position="{}",
            source="none",
            game_id=str(number),
            seed=number,
        )
        for number in range(240)
    )
    return Playing(
        paths=RunPaths(Path("none")),
        model=Path("none"),
        seed=0,
        rollouts=RolloutSettings(),
        cache=StateCache(path=Path("none"), settings=CacheSettings(), train=snapshots, held_out=()),
        host=nothing,
        engine=nothing,
        tokens=nothing,
        provenance={},
        past_spreads=nothing,
        max_policy_lag=0,
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(empty_tasks(int(sys.argv[1]), int(sys.argv[2])))) + "\n")
