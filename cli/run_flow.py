"""Run a flow from a command: in a thread of its own, so that the main thread is free to answer signals.

Prefect replaces the handler of SIGTERM by its own wherever a flow runs in the main thread, and that one raises in the middle of
whatever runs there, the event loop included. In another thread it leaves signals alone.
"""

import asyncio
import contextvars
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_flow(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, as `asyncio.run` does; its result.

    Raises:
        KeyboardInterrupt: a signal asked this process to end; `work` was cancelled, and has ended.
    """
    outcome: Future[T] = Future()
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = Future()

    async def begin() -> T:
        task = asyncio.current_task()
        assert task is not None, "asyncio.run makes one"
        begun.set_result((asyncio.get_running_loop(), task))
        return await work

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(begin()))
        except BaseException as error:
            outcome.set_exception(error)

    # A daemon: where the process has to end at once, nothing waits for it.
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
        assert loop.is_closed(), "it ended by itself at the same moment"
