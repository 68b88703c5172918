"""An engine that outlives its own death: built again in place, its versions published again, its requests asked again.

Promise: a request that an engine lost is drawn by the next one with the same seed, so nobody sees the difference but in time; and
an engine that fails again and again without answering anything in between is given up, with a sentence. It stands around any
`Engine`, in a worker as in the flow's own process, and lives on the engine's event loop.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

from inference.engine import Engine, EngineStats
from records.generation import Generation, GenerationRequest
from records.policy_version import PolicyVersion
from telemetry.errors import DataError, EngineError, EngineLostError
from telemetry.progress import reporter

_COUNTS = tuple(field.name for field in fields(EngineStats) if field.name not in ("running", "policy_version"))

ENGINE_RESTARTS = 3
"""Times in a row that an engine which failed is built again, with no request answered in between."""


class EngineSupervisor:
    """The `Engine` contract over engines that `make` builds, one at a time, at most `restarts` in a row in vain."""

    def __init__(self, make: Callable[[], Engine], *, restarts: int = ENGINE_RESTARTS) -> None:
        self._make, self._bound = make, restarts
        self._engine = make()
        self.name = self._engine.name
        self.ready = False
        """An engine is up and serves all that was published."""
        self.lost: EngineLostError | None = None
        """Why no engine will be built any more."""
        self.restarts = 0
        """Engines built after the first."""
        self._failures = 0
        self._closed = False
        self._published: dict[int, PolicyVersion] = {}
        self._earlier_counts = dict.fromkeys(_COUNTS, 0)
        self._repair: asyncio.Task[None] | None = None
        self._last_attempt = asyncio.Lock()
        """Held while one request is asked for the last time, so that a request which makes the engine fail does not take along
        others that were in flight with it."""

    async def start(self) -> None:
        """See `Engine.start`."""
        await self._engine.start()
        self.ready = True

    async def generate(self, request: GenerationRequest) -> Generation:
        """Draw one completion, by a later engine if need be; see `Engine.generate`."""
        attempts = max(2, self._bound)
        for number in range(1, attempts + 1):
            async with self._last_attempt if number == attempts else nullcontext():
                engine = await self._current_engine()
                try:
                    generation = await engine.generate(request)
                except EngineLostError as error:
                    await self._replace_engine(engine, error)
                except EngineError as error:
                    if self._closed:
                        raise EngineLostError(f"engine '{self.name}' was closed") from error
                    if engine is self._engine and self.ready:
                        raise
                    # It was closed under the request, to be built again, or could not be.
                    await self._replace_engine(engine, EngineLostError(str(error)))
                else:
                    self._failures = 0
                    return generation
        # It may be the cause: the engine stands again, and goes on without it.
        raise EngineLostError(
            f"request '{request.request_id}' was in flight each time that engine '{self.name}' failed, and is given up"
        )

    async def publish(self, policy: PolicyVersion) -> None:
        """See `Engine.publish`."""
        while True:
            engine = await self._current_engine()
            try:
                await engine.publish(policy)
            except EngineLostError as error:
                await self._replace_engine(engine, error)
            else:
                break
        self._published.pop(policy.version, None)  # the newest stands last
        self._published[policy.version] = policy
        if engine is not self._engine:  # built again meanwhile, without this version
            await self.publish(policy)

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        """See `Engine.retire`."""
        newest = next(reversed(self._published), None)
        self._published = {
            version: found
            for version, found in self._published.items()
            if version >= oldest or version in keep or version == newest
        }
        await (await self._current_engine()).retire(oldest, keep)

    async def reset(self) -> None:
        """Serve the base model alone, as when it started."""
        await self._current_engine()
        self._published.clear()
        await self._run_repair(self._rebuild(self._engine))

    async def stats(self) -> EngineStats:
        """Counts over all engines so far."""
        now = await self._engine.stats()
        sums = {name: self._earlier_counts[name] + getattr(now, name) for name in _COUNTS}
        return EngineStats(running=now.running, policy_version=now.policy_version, **sums)

    def events(self) -> dict[str, int]:
        """What went wrong so far, by name."""
        return {"engine_restarts": self.restarts}

    async def close(self) -> None:
        """See `Engine.close`."""
        self._closed, self.ready = True, False
        if self._repair is not None:
            self._repair.cancel()
        await self._engine.close()

    async def _current_engine(self) -> Engine:
        """The engine, once nobody builds at it."""
        if self._repair is not None and not self._repair.done():
            await asyncio.shield(self._repair)
        if self.lost is not None:
            raise self.lost
        return self._engine

    async def _replace_engine(self, failed: Engine, error: EngineLostError) -> None:
        """Build another engine after `failed`, unless someone did already, or does.

        Raises:
            EngineLostError: it failed too often in a row.
        """
        if self._closed:
            raise error
        current = await self._current_engine()
        if current is failed:
            await self._run_repair(self._rebuild_until_it_starts(failed, error))

    async def _run_repair(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work` as a task of its own: who waits for it may give up, and it goes on."""
        self.ready = False
        self._repair = asyncio.get_running_loop().create_task(work)
        # Its failure is kept in `lost`, or told to who waits; if nobody does, it is no defect.
        self._repair.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._repair)

    async def _rebuild_until_it_starts(self, failed: Engine, error: EngineLostError) -> None:
        while self._engine is failed:
            if self._failures >= self._bound:
                self.lost = EngineLostError(
                    f"engine '{self.name}' failed {self._failures + 1} times in a row, the last time so: {error}"
                )
                raise self.lost from error
            self._failures += 1
            reporter().say(f"engine '{self.name}' failed and is built again: {error}")
            try:
                await self._rebuild(failed)
            except EngineError as again:
                error = EngineLostError(str(again))

    async def _rebuild(self, old: Engine) -> None:
        counts = await old.stats()
        try:
            await old.close()
        except Exception as error:
            reporter().say(f"engine '{self.name}' could not be closed, and is left behind: {error!r}")
        fresh = self._make()
        await fresh.start()
        newest = next(reversed(self._published), None)
        for version, policy in list(self._published.items()):
            try:
                await fresh.publish(policy)
            except DataError as error:
                if version == newest:
                    raise EngineLostError(f"version {version} could not be published again: {error}") from error
                del self._published[version]  # an old one, whose folder may be gone: asking for it says so
        for name in _COUNTS:
            self._earlier_counts[name] += getattr(counts, name)
        self._engine, self.ready = fresh, True
        self.restarts += 1
