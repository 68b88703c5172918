"""Restarts a failed engine: builds a new one, publishes its versions again and repeats its requests.

A repeated request has the same seed, so its completion is the same. After several failures in a row the supervisor gives up with
an error. For engines whose own process can crash, such as vLLM's server; runs on their event loop.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

from entente.inference.engine import Engine, EngineStats
from entente.records.policy_version import PolicyVersion
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.errors import DataError, EngineError, EngineLostError
from entente.telemetry.progress import reporter

_COUNTS = tuple(field.name for field in fields(EngineStats) if field.name not in ("running", "policy_version"))

ENGINE_RESTARTS = 3
"""Consecutive restarts without an answered request before the supervisor gives up."""


class EngineSupervisor(Engine):
    """The `Engine` contract over engines that `make` builds, one at a time; gives up after `restarts` failures in a row."""

    def __init__(self, make: Callable[[], Engine], *, restarts: int = ENGINE_RESTARTS) -> None:
        self._make, self._bound = make, restarts
        self._engine = make()
        self.name = self._engine.name
        self.ready = False
        self.lost: EngineLostError | None = None
        self.restarts = 0
        self._failures = 0
        self._closed = False
        self._published: dict[int, PolicyVersion] = {}
        self._earlier_counts = dict.fromkeys(_COUNTS, 0)
        self._earlier_events = Counter[str]()
        self._repair: asyncio.Task[None] | None = None
        self._last_attempt = asyncio.Lock()
        """Held during a request's last attempt, so that a request that crashes the engine does not fail others with it."""

    async def start(self) -> None:
        await self._engine.start()
        self.ready = True

    async def generate(self, request: GenerationRequest) -> Generation:
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
                    # The engine was closed during the request, for a restart.
                    await self._replace_engine(engine, EngineLostError(str(error)))
                else:
                    self._failures = 0
                    return generation
        # The request may be the cause. The engine was restarted and continues without it.
        raise EngineLostError(
            f"request '{request.request_id}' was in flight each time engine '{self.name}' failed, so it is given up"
        )

    async def publish(self, policy: PolicyVersion) -> None:
        while True:
            engine = await self._current_engine()
            try:
                await engine.publish(policy)
            except EngineLostError as error:
                await self._replace_engine(engine, error)
            else:
                break
        self._published.pop(policy.version, None)  # the newest is last
        self._published[policy.version] = policy
        if engine is not self._engine:  # restarted meanwhile, without this version
            await self.publish(policy)

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        newest = next(reversed(self._published), None)
        self._published = {
            version: policy
            for version, policy in self._published.items()
            if version >= oldest or version in keep or version == newest
        }
        await (await self._current_engine()).retire(oldest, keep)

    async def forget_prefixes(self) -> None:
        await (await self._current_engine()).forget_prefixes()

    async def stats(self) -> EngineStats:
        now = await self._engine.stats()
        sums = {name: self._earlier_counts[name] + getattr(now, name) for name in _COUNTS}
        return EngineStats(running=now.running, policy_version=now.policy_version, **sums)

    def events(self) -> dict[str, int]:
        own = {name: count + self._earlier_events[name] for name, count in self._engine.events().items()}
        return {"engine_restarts": self.restarts, **own}

    async def close(self) -> None:
        self._closed, self.ready = True, False
        if self._repair is not None:
            self._repair.cancel()
            await asyncio.wait({self._repair})  # it closes the engine that it was starting
        await self._engine.close()

    async def _current_engine(self) -> Engine:
        if self._repair is not None and not self._repair.done():
            await asyncio.shield(self._repair)
        if self.lost is not None:
            raise self.lost
        return self._engine

    async def _replace_engine(self, failed: Engine, error: EngineLostError) -> None:
        """Restart unless another request has already done so. Raises EngineLostError after too many failures in a row."""
        if self._closed:
            raise error
        current = await self._current_engine()
        if current is failed:
            await self._run_repair(self._rebuild_until_it_starts(failed, error))

    async def _run_repair(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work` in a separate task, which continues if the caller is cancelled."""
        self.ready = False
        self._repair = asyncio.get_running_loop().create_task(work)
        # Reads the exception, so that asyncio does not report it as unhandled; it is kept in `lost` or raised to the callers.
        self._repair.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._repair)

    async def _rebuild_until_it_starts(self, failed: Engine, error: EngineLostError) -> None:
        while self._engine is failed:
            if self._failures >= self._bound:
                self.lost = EngineLostError(
                    f"engine '{self.name}' failed {self._failures + 1} times in a row, most recently: {error}"
                )
                raise self.lost from error
            self._failures += 1
            reporter().say(f"engine '{self.name}' failed; restarting it: {error}")
            try:
                await self._rebuild(failed)
            except EngineError as again:
                error = EngineLostError(str(again))

    async def _rebuild(self, old: Engine) -> None:
        counts, events = await old.stats(), old.events()
        await self._try_to_close(old)
        fresh = self._make()
        try:
            await fresh.start()
            await self._publish_again(fresh)
        except BaseException:
            await asyncio.shield(self._try_to_close(fresh))
            raise
        for name in _COUNTS:
            self._earlier_counts[name] += getattr(counts, name)
        self._earlier_events.update(events)
        self._engine, self.ready = fresh, True
        self.restarts += 1

    async def _publish_again(self, fresh: Engine) -> None:
        newest = next(reversed(self._published), None)
        for version, policy in list(self._published.items()):
            try:
                await fresh.publish(policy)
            except DataError as error:
                if version == newest:
                    raise EngineLostError(f"version {version} could not be published again: {error}") from error
                del self._published[version]  # an old version, whose folder may have been removed; requests for it will fail

    async def _try_to_close(self, engine: Engine) -> None:
        try:
            await engine.close()
        except Exception as error:
            reporter().say(f"engine '{self.name}' could not be closed: {error!r}")
