"""One engine that the runs of a process use one after another, instead of an engine for each run.

A run gets the engine as it would start: with the base model alone, and no prefix in its cache. So it draws what an engine of
its own would draw (tested). The engine is closed when a run ends with an error, and replaced where a run has another model or
other settings of inference. Engines of workers elsewhere are never kept. Neither are engines on a card, because the next run's
plan counts the memory that is free there.
"""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path

from inference.engine import Engine, EngineWithPrefixes
from inference.engine_cards import computes_on_card
from inference.host import EngineHost
from inference.settings import InferenceSettings
from inference.start_engine import start_engine
from records.policy_version import BASE
from workers.make_engine import make_engine


class KeptEngine:
    """The engine, its thread, and what it was started for."""

    def __init__(self) -> None:
        self.starts = 0
        """Engines started so far."""
        self._running: tuple[InferenceSettings, Path, EngineHost, Engine] | None = None
        self._started = False

    @cached_property
    def environment(self) -> dict[str, str]:
        """Variables of this process when the first run asked for them, before vLLM was imported: for the trainers of all runs."""
        return dict(os.environ)

    @asynccontextmanager
    async def lent(self, settings: InferenceSettings, model: Path) -> AsyncIterator[tuple[EngineHost, Engine]]:
        """The engine for these settings and this model, not yet `ready`; it is closed if the block ends with an error."""
        if self._running is not None and self._running[:2] != (settings, model):
            await self.close()
        if self._running is None:
            self._running = settings, model, EngineHost(), make_engine(settings, model)
            self._started = False
        try:
            yield self._running[2:]
        except BaseException:
            await self.close()
            raise

    async def ready(self) -> None:
        """Start the engine, or have it forget the versions and prefixes of the run before."""
        assert self._running is not None, "an engine is lent first"
        settings, _, host, engine = self._running
        if not self._started:
            await start_engine(host, engine, settings)
            self._started, self.starts = True, self.starts + 1
            return
        await host.run(engine.publish(BASE))
        await host.run(engine.retire(sys.maxsize))
        if isinstance(engine, EngineWithPrefixes):
            await host.run(engine.forget_prefixes())

    async def close(self) -> None:
        """End the engine and its thread."""
        if self._running is None:
            return
        (_, _, host, engine), self._running = self._running, None
        try:
            await host.run(engine.close())
        finally:
            host.close()


_KEPT: ContextVar[KeptEngine | None] = ContextVar("kept_engine", default=None)


@asynccontextmanager
async def keep_engine() -> AsyncIterator[KeptEngine]:
    """Runs that are opened inside the block share an engine."""
    kept = KeptEngine()
    before = _KEPT.set(kept)
    try:
        yield kept
    finally:
        _KEPT.reset(before)
        await kept.close()


def kept_engine(settings: InferenceSettings) -> KeptEngine | None:
    """What lends the run of these settings its engine; None: the run has an engine of its own."""
    return None if settings.urls or computes_on_card(settings) else _KEPT.get()
