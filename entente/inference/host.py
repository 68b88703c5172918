"""One thread with one event loop, on which engines and rollouts run.

Prefect runs every async task in its own event loop, so tasks cannot share asyncio objects. They submit coroutines to this loop
and await the results. With one engine in the process, games and engine share the thread, so the order of requests, and with it
every draw, is repeatable.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EngineHost:
    """Owns one thread with one running event loop, from construction to `close`."""

    def __init__(self, name: str = "engine") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException:  # an exit request raised on this thread: cancel the rest, so that nothing waits for it
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
        """Cancel running work, stop the loop and join the thread."""
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
