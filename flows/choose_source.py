"""Opens the source of a run's rollouts and the queue that schedules them.

The source is this process or a Dask cluster. The flow does not depend on which it is.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from inference.server_arguments import start_limit_s
from pipeline.dask_rollouts import DaskCluster, DaskPlan, dask_cluster
from pipeline.play import RolloutReport
from pipeline.resources import Resources
from pipeline.rollout_queue import RolloutQueue
from pipeline.rollout_source import RolloutSource, Stretch, groups_per_task
from pipeline.run_settings import ROLLOUT_TIMEOUT_S, RunSettings
from pipeline.threads import usable_cores
from tasks.quoted import quoted
from tasks.rollouts import roll_out_groups, roll_out_on_dask


class LocalSource:
    """Plays in this process, with one Prefect task for each stretch."""

    def __init__(self, resources: Resources, settings: RunSettings) -> None:
        self._resources, self.groups_per_task = resources, groups_per_task(settings)

    async def play(self, stretch: Stretch) -> RolloutReport:
        """See `RolloutSource.play`."""
        return await roll_out_groups(quoted(self._resources), stretch.step, stretch.first_group, stretch.count, stretch.after)


class DaskSource:
    """Plays on a Dask cluster. Each stretch has one Prefect task, which waits in this process."""

    def __init__(self, resources: Resources, settings: RunSettings, cluster: DaskCluster) -> None:
        self._spans, self._cluster, self.groups_per_task = resources.spans, cluster, groups_per_task(settings)

    async def play(self, stretch: Stretch) -> RolloutReport:
        """See `RolloutSource.play`. The stretch counts as rollout time from here on."""
        with self._spans.span("rollout"):
            return await roll_out_on_dask(quoted(self._cluster), stretch.step, stretch.first_group, stretch.count, stretch.after)


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
        async with dask_cluster(settings.paths.root, _dask_plan(settings)) as cluster:
            yield DaskSource(resources, settings, cluster)
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
    )
