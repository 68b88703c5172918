"""Runs a flow with a Prefect server and progress on standard error, in its own thread: the main thread handles signals.

If a flow runs in the main thread, Prefect installs its own handler of SIGTERM, which raises an exception inside any code, also
inside the event loop. In another thread Prefect installs no handler.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from entente.cli.prefect_server import prefect_server
from entente.cli.terminal import progress_shown

T = TypeVar("T")


def run_flow(flow: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of a flow, which is called when Prefect's server answers."""
    with prefect_server(), progress_shown():
        return run_in_thread(flow())


def run_in_thread(work: Coroutine[Any, Any, T]) -> T:
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
