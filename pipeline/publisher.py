"""Serving policy versions: at once, beside the next step, or held back until the rollouts of the version before are played.

Promise: versions are served in order, each on all engines before the next begins. A version that cannot be served ends the run
when the flow next waits for it.
"""

import asyncio
from collections.abc import Callable

from pipeline.resources import Resources
from training.process import TrainedStep


class Publisher:
    """Has the engines serve what was trained."""

    def __init__(self, resources: Resources, on_served: Callable[[int], None]) -> None:
        """`on_served`: called with each version once all engines serve it."""
        self._resources, self._on_served = resources, on_served
        self._held: TrainedStep | None = None
        self._under_way: asyncio.Task[None] | None = None

    async def publish(self, trained: TrainedStep, *, at_once: bool) -> None:
        """Have the engines serve a version: `at_once`, or in the background."""
        await self._arrived()
        self._under_way = asyncio.create_task(self._publish(trained))
        if at_once:
            await self._arrived()

    def hold(self, trained: TrainedStep) -> None:
        """Keep a version back until `release`."""
        self._held = trained

    async def release(self) -> None:
        """Serve the version that was held back, if there is one."""
        held, self._held = self._held, None
        if held is not None:
            await self.publish(held, at_once=True)

    async def close(self, *, failed: bool) -> None:
        """Serve what is held or under way; after a failure, give it up."""
        if not failed:
            await self.release()
            await self._arrived()
        elif self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)

    async def _publish(self, trained: TrainedStep) -> None:
        await self._resources.serve(trained.version, trained.adapter, trained.adapter_hash)
        self._on_served(trained.version)

    async def _arrived(self) -> None:
        """Wait for the version under way, if there is one."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            await under_way


def newest_version(resources: Resources) -> TrainedStep | None:
    """The newest version of a run that goes on; None where only the base model exists."""
    standing = resources.standing
    if standing.adapter is None:
        return None
    return TrainedStep(
        version=standing.step_done,
        adapter=standing.adapter,
        adapter_hash=standing.adapter_hash,
        metrics=dict(standing.metrics),
    )
