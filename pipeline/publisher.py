"""Publishes policy versions to the engines: at once, in the background, or later on request.

Versions are published in order, each to all engines before the next. If publishing fails, the error is raised when the flow next
waits for it.
"""

import asyncio

from pipeline.resources import Resources
from records.policy_version import PolicyVersion


class Publisher:
    """Publishes trained policy versions to the engines."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._held: PolicyVersion | None = None
        self._publishing: asyncio.Task[None] | None = None

    async def publish(self, policy: PolicyVersion, *, at_once: bool) -> None:
        """Publish a version. Returns when it is served (`at_once`), or immediately."""
        await self._wait()
        self._publishing = asyncio.create_task(self._resources.serve(policy))
        if at_once:
            await self._wait()

    def hold(self, policy: PolicyVersion) -> None:
        """Keep a version until `release`."""
        self._held = policy

    async def release(self) -> None:
        """Publish the held version, if there is one."""
        held, self._held = self._held, None
        if held is not None:
            await self.publish(held, at_once=True)

    async def close(self, *, failed: bool) -> None:
        """Finish publishing, the held version included; after a failure, cancel it."""
        if not failed:
            await self.release()
            await self._wait()
        elif self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)

    async def _wait(self) -> None:
        """Wait until the current version is published, if there is one."""
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            await publishing
