"""SIGTERM ends a flow as Ctrl-C does: its task is cancelled, what is open is closed, and nothing is left behind.

Prefect's own handler raises wherever the main thread happens to be, most often inside the event loop, which then ends before
the flow could close its engine and its trainer. A worker that cancels a run sends SIGTERM too, and Prefect tells the two apart.
"""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cancelled_by_sigterm() -> Iterator[None]:
    """For the length of the block SIGTERM cancels the current task; where signals do not arrive, nothing changes."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a flow runs in a task"
    before = signal.getsignal(signal.SIGTERM)
    try:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    except (RuntimeError, ValueError):  # not the main thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
