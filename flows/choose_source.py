"""Opens the source of a run's rollouts and the queue that schedules them.

The source is this process or a Dask cluster. The flow does not depend on which it is.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from inference.server_arguments import start_limit_s
from pipeline.play import RolloutReport
from pipeline.resources import Resources
from pipeline.rollout_queue import RolloutQueue
from pipeline.rollout_source import RolloutSource, Stretch, groups_per_task
from pipeline.run_settings import ROLLOUT_RETRIES, ROLLOUT_TIMEOUT_S, RunSettings
from pipeline.threads import usable_cores
from tasks.dask_rollouts import DaskPlan, dask_source
from tasks.quoted import quoted
from tasks.rollouts import roll_out_groups


class LocalSource:
    """Plays in this process, with one Prefect task for each stretch; tasks have a time limit and retries."""

    def __init__(self, resources: Resources, settings: RunSettings) -> None:
        self._resources, self.groups_per_task = resources, groups_per_task(settings)
        self._task = roll_out_groups.with_options(
            timeout_seconds=ROLLOUT_TIMEOUT_S,
            retries=ROLLOUT_RETRIES,
            retry_delay_seconds=1,
            retry_jitter_factor=1,
        )

    async def play(self, stretch: Stretch) -> RolloutReport:
        """See `RolloutSource.play`."""
        return await self._task(quoted(self._resources), stretch.step, stretch.first_group, stretch.count, stretch.after)


@asynccontextmanager
async def open_queue(settings: RunSettings, resources: Resources) -> AsyncIterator[RolloutQueue]:
    """The queue of the run's rollouts."""
    depth, step_done = settings.pipeline.buffer_depth, resources.resume_point.step_done
    async with (
        rollout_source(settings, resources) as source,
        RolloutQueue(resources, source, depth, settings.steps, step_done=step_done) as queue,
    ):
        yield queue


@asynccontextmanager
async def rollout_source(settings: RunSettings, resources: Resources) -> AsyncIterator[RolloutSource]:
    """The source that the settings choose."""
    if settings.pipeline.task_runner == "dask":
        async with dask_source(settings.paths.root, _dask_plan(settings), resources.spans) as source:
            yield source
    else:
        yield LocalSource(resources, settings)


def _dask_plan(settings: RunSettings) -> DaskPlan:
    inference, pipeline = settings.inference, settings.pipeline
    left = usable_cores() - settings.threads[1]
    return DaskPlan(
        address=pipeline.dask_address,
        workers=pipeline.dask_workers,
        threads=inference.threads or max(1, left // pipeline.dask_workers),
        start_timeout_s=start_limit_s(inference),
        timeout_s=ROLLOUT_TIMEOUT_S,
        retries=ROLLOUT_RETRIES,
    )
