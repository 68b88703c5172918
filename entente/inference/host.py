"""One thread with one event loop, on which engines and rollouts run.

Prefect runs every async task in its own event loop, so tasks cannot share asyncio objects; they submit coroutines to this loop
instead. With one engine in the process, games and engine share the thread, so the order of requests, and with it every sample, is
repeatable. A first start on a GPU compiles and records CUDA graphs for minutes, so the host reports regularly that the engine is
still starting.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from entente.inference.engine import Engine
from entente.inference.server_arguments import compiles, start_limit_s
from entente.inference.settings import InferenceSettings
from entente.telemetry.errors import EngineError
from entente.telemetry.progress import reporter

T = TypeVar("T")
_SAY_EVERY_S = 60.0


class EngineHost:
    """Owns one thread with a running event loop, from construction to `close`."""

    def __init__(self, name: str = "engine") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException:  # an exit request in this thread: cancel the rest, so that nothing waits for it
            self._loop.run_until_complete(_cancel_others())
            raise
        finally:
            self._loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` on the host's loop. Any thread may wait for the future; cancelling it cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` on the host's loop from a coroutine of another loop."""
        return await asyncio.wrap_future(self.submit(work))

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)


async def start_engine(
    host: EngineHost, engine: Engine, settings: InferenceSettings, *, say_every_s: float = _SAY_EVERY_S
) -> None:
    """Start `engine` on `host`. A start that takes too long (EngineError) or whose caller is cancelled is cancelled; waits until
    the host's thread is free, because torch cannot interrupt loading."""
    limit, began = start_limit_s(settings), time.monotonic()
    start = asyncio.ensure_future(host.run(engine.start()))
    doing = "the model is compiled and CUDA graphs are recorded" if compiles(settings) else "the model is loaded"
    if settings.urls:
        doing = "servers are not ready"
    try:
        while not start.done():
            passed = time.monotonic() - began
            if passed >= limit:
                compiled = compiles(settings) and not settings.urls
                cure = ": set inference.engine to 'torch', which compiles nothing" if compiled else ""
                raise EngineError(f"the engine did not start within {limit:g} s{cure}")
            if passed >= say_every_s:
                reporter().say(f"the engine is still starting after {passed:.0f} s: {doing}")
            await asyncio.wait({start}, timeout=min(say_every_s, limit - passed))
        start.result()
    finally:
        if not start.done():
            start.cancel()
            await host.run(asyncio.sleep(0))


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
