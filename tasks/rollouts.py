"""The rollout tasks: some start groups of a step, and the probe that is used to compare engine and trainer."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from pipeline.play import RolloutReport, play_probe, play_stretch
from pipeline.resources import Resources


@task(
    name="rollout",
    task_run_name="rollout-s{step}-g{first_group}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def roll_out_groups(
    resources: Resources, step: int, first_group: int, count: int, after: Path | None = None
) -> RolloutReport:
    """Play start groups and publish their shard, in this process; see `play_stretch`."""
    return await play_stretch(resources, step, first_group, count, after)


@task(
    name="rollout-probe",
    task_run_name="rollout-probe-v{version}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def roll_out_probe(resources: Resources, version: int) -> None:
    """Play the probe of a resumed run; see `play_probe`."""
    await play_probe(resources, version)
