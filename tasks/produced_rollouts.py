"""The task of a rollout producer that Prefect started: a stretch of its start groups."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from pipeline.gathering import PlayedGroups
from pipeline.produce import play_stretch_of
from pipeline.rollout_side import RolloutSide


@task(
    name="rollout",
    task_run_name="rollout-{producer}-g{first_group}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def produce_groups(side: RolloutSide, producer: str, first_group: int, count: int) -> PlayedGroups:
    """Play the producer's start groups from `first_group` on; see `play_stretch_of`. The producer repeats what fails."""
    return await play_stretch_of(side, producer, first_group, count)
