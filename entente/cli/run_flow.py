"""Runs a flow in its own thread, so that the main thread can handle signals.

If a flow runs in the main thread, Prefect installs its own handler of SIGTERM, which raises an exception inside any code, also
inside the event loop. In another thread Prefect installs no handler.
"""

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_flow(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end like `asyncio.run`, and return its result."""
    outcome: Future[T] = Future()
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = Future()

    async def begin() -> T:
        task = asyncio.current_task()
        assert task is not None, "asyncio.run starts a task"
        begun.set_result((asyncio.get_running_loop(), task))
        return await work

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(begin()))
        except BaseException as error:
            outcome.set_exception(error)

    # A daemon thread does not delay the end of the process.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="flow", daemon=True)
    try:
        thread.start()
        return outcome.result()
    except KeyboardInterrupt:
        if thread.is_alive():
            loop, task = begun.result()
            if not outcome.done():
                _cancel(loop, task)
            outcome.exception()
        raise


def _cancel(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[Any]") -> None:
    try:
        loop.call_soon_threadsafe(task.cancel)
    except RuntimeError:
        assert loop.is_closed(), "only a loop that has ended refuses calls"
