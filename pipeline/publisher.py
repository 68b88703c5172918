"""Publishing a policy version to the engines: beside the next step where steps overlap, or held back until that is played.

Promise: versions are published in order, each whole before the next begins; one that fails ends the run at the next look.
"""

import asyncio
from typing import Self

from pipeline.resources import Resources
from pipeline.rollout_queue import RolloutQueue
from storage.adapters import read_adapter
from telemetry.errors import DataError
from telemetry.progress import reporter
from training.process import TrainedStep


class Publisher:
    """Has what was trained played."""

    def __init__(self, resources: Resources, queue: RolloutQueue, held_back: TrainedStep | None = None) -> None:
        """`held_back`: a version to `hold` from the beginning."""
        self._resources, self._queue, self._held = resources, queue, held_back
        self._under_way: asyncio.Task[None] | None = None

    async def publish(self, trained: TrainedStep, *, at_once: bool) -> None:
        """Let the engines play a version: `at_once`, or while the flow goes on with what is ready already."""
        await self._arrived()
        self._under_way = asyncio.create_task(self._publish(trained))
        if at_once:
            await self._arrived()

    def hold(self, trained: TrainedStep) -> None:
        """Keep a version back until `release`: the rollouts in flight are to be of the one before, all of them."""
        self._held = trained

    async def release(self) -> None:
        """Let the engines play the version that was held back, if there is one."""
        held, self._held = self._held, None
        if held is not None:
            await self.publish(held, at_once=True)

    async def _publish(self, trained: TrainedStep) -> None:
        await self._resources.serve(trained.version, trained.adapter, trained.adapter_hash)
        self._queue.published(trained.version)

    async def _arrived(self) -> None:
        """Wait for the version under way, if there is one."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            await under_way

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Scores are played by the newest version: it arrives first. Where the run ends otherwise, it is given up."""
        if kind is None:
            await self.release()
            await self._arrived()
        elif self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)


async def serve_where_it_stands(resources: Resources, *, one_behind: bool) -> TrainedStep | None:
    """Let the engines play what a run that goes on had them play.

    Args:
        one_behind: its next step is trained on rollouts of the version before its newest one.

    Returns:
        the newest version, if it is to be held back until those rollouts are played.
    """
    standing = resources.standing
    if standing.adapter is None:
        return None
    version = standing.step_done
    newest = TrainedStep(
        version=version, adapter=standing.adapter, adapter_hash=standing.adapter_hash, metrics=dict(standing.metrics)
    )
    if one_behind:
        if version == 1:
            return newest  # the engines have begun with the base
        try:
            before = await asyncio.to_thread(read_adapter, resources.paths, version - 1)
        except DataError as gone:
            reporter().say(
                f"the rollouts of step {version + 1} are of version {version} where they should be of the one before: {gone}"
            )
        else:
            await resources.serve(before.version, before.path, before.adapter_hash)
            return newest
    await resources.serve(version, newest.adapter, newest.adapter_hash)
    return None
