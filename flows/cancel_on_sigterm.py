"""SIGTERM cancels a flow's task, as Ctrl-C does, so that the flow closes its engine and its trainer.

Prefect's own handler raises in the main thread, most often inside the event loop. The loop then ends before the flow can close
anything. A Prefect worker that cancels a flow run also sends SIGTERM; Prefect distinguishes the two cases.
"""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

_CANCELLED_BY_IT: "WeakSet[asyncio.Task]" = WeakSet()
"""Tasks inside the block."""


@contextmanager
def cancelled_by_sigterm() -> Iterator[None]:
    """SIGTERM cancels the current task inside the block. No effect outside the main thread, which receives no signals.

    A block inside another one of the same task, as that of a subflow, changes nothing, so its end does not end the outer one.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a flow runs in a task"
    if task in _CANCELLED_BY_IT:
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    except (RuntimeError, ValueError):  # not the main thread
        yield
        return
    _CANCELLED_BY_IT.add(task)
    try:
        yield
    finally:
        _CANCELLED_BY_IT.discard(task)
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)
