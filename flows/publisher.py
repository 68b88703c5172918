"""Publishing a policy version to the engines, beside the next step where steps overlap.

Promise: versions are published in order, each whole before the next begins; one that fails ends the run at the next look.
"""

import asyncio
from typing import Self

from flows.rollout_queue import RolloutQueue
from tasks.resources import Resources
from tasks.training import TrainedStep


class Publisher:
    """Has what was trained played."""

    def __init__(self, resources: Resources, queue: RolloutQueue) -> None:
        self._resources, self._queue = resources, queue
        self._under_way: asyncio.Task[None] | None = None

    async def publish(self, trained: TrainedStep, *, at_once: bool) -> None:
        """Let the engines play a version: `at_once`, or while the flow goes on with what is ready already."""
        await self._arrived()
        self._under_way = asyncio.create_task(self._publish(trained))
        if at_once:
            await self._arrived()

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
        if kind is not None and self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)
            return
        await self._arrived()
