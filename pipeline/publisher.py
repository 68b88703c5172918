"""Serving policy versions: at once, beside the next step, or held back until the rollouts of the version before are played.

Promise: versions are served in order, each on all engines before the next begins. A version that cannot be served ends the run
when the flow next waits for it.
"""

import asyncio
from collections.abc import Callable

from pipeline.resources import Resources
from records.policy_version import PolicyVersion


class Publisher:
    """Has the engines serve what was trained."""

    def __init__(self, resources: Resources, on_served: Callable[[int], None]) -> None:
        """`on_served`: called with each version once all engines serve it."""
        self._resources, self._on_served = resources, on_served
        self._held: PolicyVersion | None = None
        self._under_way: asyncio.Task[None] | None = None

    async def publish(self, policy: PolicyVersion, *, at_once: bool) -> None:
        """Have the engines serve a version: `at_once`, or in the background."""
        await self._arrived()
        self._under_way = asyncio.create_task(self._publish(policy))
        if at_once:
            await self._arrived()

    def hold(self, policy: PolicyVersion) -> None:
        """Keep a version back until `release`."""
        self._held = policy

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

    async def _publish(self, policy: PolicyVersion) -> None:
        await self._resources.serve(policy)
        self._on_served(policy.version)

    async def _arrived(self) -> None:
        """Wait for the version under way, if there is one."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            await under_way
