"""Flow of rollout tasks without work, to measure the cost of a Prefect task; `entente bench orchestration` runs it.

    python -m benchmarks.empty_tasks COUNT IN_FLIGHT threads|dask

Tasks have the names, limits and resources of a training run's tasks, IN_FLIGHT at a time. With `dask` they run on a cluster of
two processes on this machine, which is started first. The last line is one JSON object.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from game.snapshot import Snapshot
from pipeline.play import RolloutReport
from pipeline.resources import RolloutResources
from pipeline.rollout_source import Stretch
from pipeline.run_settings import PipelineSettings
from pipeline.stretches import ROLLOUT_RETRIES
from rollouts.settings import RolloutSettings
from state_cache.settings import CacheSettings
from state_cache.store import StateCache
from storage.runs import RunPaths
from tasks.dask_rollouts import DaskPlan, dask_source
from tasks.quoted import quoted
from telemetry.timing import Spans

Play = Callable[[Stretch], Awaitable[object]]
WARM_UP = 8
"""Tasks before the measurement: the first ones import and connect."""


@task(
    name="rollout",
    task_run_name="empty-s{step}-g{first_group}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def play_nothing(
    resources: RolloutResources, step: int, first_group: int, count: int, after: Path | None = None
) -> RolloutReport:
    """Replaces `roll_out_groups`."""
    return _nothing(count)


@task(
    name="rollout",
    task_run_name="empty-s{step}-g{first_group}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def play_nothing_elsewhere(
    root: str, step: int, first_group: int, count: int, call: str, after: Path | None = None
) -> RolloutReport:
    """Replaces `roll_out_elsewhere`."""
    return _nothing(count)


@flow(name="empty-tasks", flow_run_name="empty-tasks-{count}-{runner}")
async def empty_tasks(count: int, in_flight: int, runner: str) -> dict[str, Any]:
    """Run `count` tasks after WARM_UP others."""
    async with (_on_dask if runner == "dask" else _in_this_process)() as play:
        await asyncio.gather(*(play(Stretch(number, 1, 0)) for number in range(WARM_UP)))
        began, cpu = time.monotonic(), time.process_time()
        busy: set[asyncio.Task[object]] = set()
        for number in range(count):
            if len(busy) >= in_flight:
                _, busy = await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
            busy.add(asyncio.ensure_future(play(Stretch(number, 1, number // 8 + 1))))
        await asyncio.gather(*busy)
        seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
    return {
        "tasks": count,
        "all_tasks": count + WARM_UP,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "flow_run": str(flow_run.id),
    }


@asynccontextmanager
async def _in_this_process() -> AsyncIterator[Play]:
    pipeline, playing = PipelineSettings(), _playing()
    work = play_nothing.with_options(
        timeout_seconds=pipeline.rollout_timeout_s,
        retries=ROLLOUT_RETRIES,
        retry_delay_seconds=1,
        retry_jitter_factor=1,
    )
    yield lambda stretch: work(quoted(playing), stretch.step, stretch.first_group, stretch.count)


@asynccontextmanager
async def _on_dask() -> AsyncIterator[Play]:
    plan = DaskPlan(address="", workers=2, threads=1, start_timeout_s=120, no_worker_timeout_s=120, timeout_s=900, retries=2)
    with TemporaryDirectory() as root:
        async with dask_source(Path(root), plan, Spans()) as source:
            # Replace the task of the source; all else stays.
            source._task = play_nothing_elsewhere.with_options(timeout_seconds=plan.timeout_s, retries=plan.retries)
            yield source.play


def _nothing(count: int) -> RolloutReport:
    return RolloutReport(
        start_groups=count,
        decisions=0,
        failed_forks=0,
        orders_rejected=0,
        set_aside=0,
        seconds=0.0,
        engine_work=None,
        engine_ms=None,
    )


def _playing() -> RolloutResources:
    """Resources as large as those of a run, because passing them to a task takes time."""
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
    return RolloutResources(
        paths=RunPaths(Path("none")),
        model=Path("none"),
        seed=0,
        rollouts=RolloutSettings(),
        cache=StateCache(path=Path("none"), settings=CacheSettings(), train=snapshots, held_out=()),
        host=nothing,
        engine=nothing,
        tokens=nothing,
        provenance={},
        past_returns=nothing,
        max_policy_lag=0,
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(empty_tasks(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))) + "\n")
