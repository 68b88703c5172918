"""Flow of rollout tasks without work, to measure the cost of a Prefect task; `entente bench orchestration` runs it.

    python -m benchmarks.empty_tasks COUNT IN_FLIGHT

Tasks have the names, limits and resources of a training run's tasks, IN_FLIGHT at a time. The last line is one JSON object.
"""

import asyncio
import json
import sys
import time
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from pipeline.run_settings import ROLLOUT_RETRIES, ROLLOUT_TIMEOUT_S
from tasks.quoted import quoted

WARM_UP = 8
"""Tasks before the measurement: the first ones import and connect."""


@task(
    name="rollout",
    task_run_name="empty-s{step}-g{first_group}",
    cache_policy=NO_CACHE,
    persist_result=False,
    timeout_seconds=ROLLOUT_TIMEOUT_S,
    retries=ROLLOUT_RETRIES,
    retry_delay_seconds=1,
    retry_jitter_factor=1,
)
async def play_nothing(resources: object, step: int, first_group: int, count: int) -> int:
    """Replaces `roll_out_groups`."""
    return count


@flow(name="empty-tasks", flow_run_name="empty-tasks-{count}")
async def empty_tasks(count: int, in_flight: int) -> dict[str, Any]:
    """Run `count` tasks after WARM_UP others."""
    resources = object()  # quoted, as a run's are, so its size does not matter
    await asyncio.gather(*(play_nothing(quoted(resources), 0, number, 1) for number in range(WARM_UP)))
    began, cpu = time.monotonic(), time.process_time()
    busy: set[asyncio.Future[int]] = set()
    for number in range(count):
        if len(busy) >= in_flight:
            _, busy = await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
        busy.add(asyncio.ensure_future(play_nothing(quoted(resources), number // 8 + 1, number, 1)))
    await asyncio.gather(*busy)
    seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
    return {"tasks": count, "all_tasks": count + WARM_UP, "seconds": seconds, "cpu_s": cpu_s, "flow_run": str(flow_run.id)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(empty_tasks(int(sys.argv[1]), int(sys.argv[2])))) + "\n")
