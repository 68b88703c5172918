"""Which rollout source a run has: this process, until the settings name another.

The flow asks once, keeps the source open while it trains, and never looks which one it is.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flows.run_settings import PipelineSettings, RunSettings
from tasks.resources import Resources
from tasks.rollout_source import RolloutSource, Stretch
from tasks.rollouts import RolloutReport, roll_out_groups


class LocalSource:
    """Plays in this process, a Prefect task for each stretch: with its time-out, and tried again where it failed."""

    def __init__(self, resources: Resources, pipeline: PipelineSettings) -> None:
        self._resources = resources
        self._task = roll_out_groups.with_options(
            timeout_seconds=pipeline.rollout_timeout_s,
            retries=pipeline.rollout_retries,
            retry_delay_seconds=1,
            retry_jitter_factor=1,
        )

    async def play(self, stretch: Stretch) -> RolloutReport:
        """See `RolloutSource.play`."""
        return await self._task(self._resources, stretch.step, stretch.first_group, stretch.count)


@asynccontextmanager
async def rollout_source(settings: RunSettings, resources: Resources) -> AsyncIterator[RolloutSource]:
    """The source that the settings mean, open for the length of the block."""
    yield LocalSource(resources, settings.pipeline)
