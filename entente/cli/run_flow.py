"""Runs a flow with a Prefect server and progress on stderr, in its own thread; the main thread handles signals. In the main
thread Prefect would install a SIGTERM handler that raises inside any code, also inside the event loop."""

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from entente.cli.terminal import show_progress
from entente.prefect_server.database import check_room
from entente.prefect_server.own_server import prefect_server
from entente.telemetry.errors import DiskFullError, EntenteError
from entente.telemetry.progress import reporter

T = TypeVar("T")
LOOKS_EVERY_S = 5.0
FULL_FOR_S = 60.0
"""Seconds for which the disk of Prefect's database may be full before the flow ends, and the time limit for ending it."""


def run_flow(flow: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a flow once Prefect's server answers; raises DiskFullError if the disk of Prefect's database is full."""
    with prefect_server(), show_progress():
        try:
            return run_in_thread(flow(), _RoomWatch().look)
        except EntenteError:
            raise
        except Exception:  # Prefect's own error says that the server does not answer
            check_room()
            raise


class _RoomWatch:
    """Reports once that the disk of Prefect's database is full, and raises if it stays full for `FULL_FOR_S`."""

    def __init__(self) -> None:
        self._full_since: float | None = None

    def look(self) -> None:
        try:
            check_room()
        except DiskFullError as error:
            if self._full_since is None:
                self._full_since = time.monotonic()
                reporter().say(f"{error} within {FULL_FOR_S:.0f} s, or the flow stops")
            elif time.monotonic() - self._full_since >= FULL_FOR_S:
                raise
        else:
            self._full_since = None


def run_in_thread(work: Coroutine[Any, Any, T], look: Callable[[], None] = lambda: None) -> T:
    """Run `work` like `asyncio.run`; `look` is called every `LOOKS_EVERY_S` and may raise DiskFullError."""
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
        while not wait([outcome], LOOKS_EVERY_S).done:
            look()
        return outcome.result()
    except (KeyboardInterrupt, DiskFullError) as end:
        if thread.is_alive():
            loop, task = begun.result()
            if not outcome.done():
                _cancel(loop, task)
            if not wait([outcome], FULL_FOR_S if isinstance(end, DiskFullError) else None).done:
                # It still waits for the server. What it would log has nowhere to go, and becomes tracebacks as the process ends.
                logging.getLogger("prefect.flow_runs").disabled = True
        raise


def _cancel(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[Any]") -> None:
    try:
        loop.call_soon_threadsafe(task.cancel)
    except RuntimeError:
        assert loop.is_closed(), "only a loop that has ended refuses calls"
