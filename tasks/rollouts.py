"""The rollout tasks: some start groups of a step, and the probe that is used to compare engine and trainer."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from entente.pipeline.dask_rollouts import DaskCluster
from entente.pipeline.play import Figures, Stretch, play_probe, play_stretch
from entente.pipeline.resources import Resources
from entente.pipeline.run_settings import ROLLOUT_RETRIES, ROLLOUT_TIMEOUT_S


@task(
    name="rollout",
    task_run_name="rollout-s{stretch.step}-g{stretch.first_group}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=ROLLOUT_RETRIES,
    retry_delay_seconds=1,
    retry_jitter_factor=1,
)
async def roll_out_on_dask(resources: Resources, cluster: DaskCluster, stretch: Stretch) -> Figures:
    """Have a worker of a Dask cluster play start groups and publish their shard. The time limit is the worker's: a stretch may
    wait for one."""
    with resources.spans.span("rollout"):
        return await cluster.play(stretch)


@task(
    name="rollout",
    task_run_name="rollout-s{stretch.step}-g{stretch.first_group}",
    cache_policy=NO_CACHE,
    persist_result=False,
    timeout_seconds=ROLLOUT_TIMEOUT_S,
    retries=ROLLOUT_RETRIES,
    retry_delay_seconds=1,
    retry_jitter_factor=1,
)
async def roll_out_groups(resources: Resources, stretch: Stretch) -> Figures:
    """Play start groups and publish their shard, in this process; see `play_stretch`."""
    return await play_stretch(resources, stretch)


@task(
    name="rollout-probe",
    task_run_name="rollout-probe-v{version}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def roll_out_probe(resources: Resources, version: int) -> None:
    """Play the probe of a resumed run; see `play_probe`."""
    await play_probe(resources, version)
