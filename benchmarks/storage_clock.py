"""How the store's work is timed: CPU seconds of all threads, or by the clock where it waits for a disk; with the caches as they
came, or emptied.

Never: a figure of work that came to nothing (`found`).
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from telemetry.errors import DataError


def timed(work: Callable[[], Any], clock: Callable[[], float] = lambda: time.process_time()) -> tuple[float, Any]:
    began = clock()
    done = work()
    return clock() - began, done


def timed_cold(work: Callable[[], Any], far: np.ndarray, before: Callable[[], Any] | None = None) -> tuple[float, Any]:
    """As `timed`, after memory was read that leaves no room in any cache for what the work reads or writes. Nor for the program
    itself, but for what `before` brings back: a little of the same work, on other data."""
    far.sum()
    if before is not None:
        before()
    return timed(work)


def waited(work: Callable[[], Any]) -> tuple[float, Any]:
    return timed(work, lambda: time.perf_counter())


def found(something: object, what: str) -> None:
    if not something:
        raise DataError(f"the benchmark did not find {what}, so its time would say nothing: report this")
