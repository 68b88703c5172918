"""Prepares the batch that the next step will probably use, in a thread, while the current step is computed.

A prepared batch is used only if the step chooses exactly its rows in the same order; else it is dropped. A `DataError`
meanwhile is ignored, because the step itself meets the same data again. Any other error is raised when the next batch is
requested.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pyarrow as pa

from storage.gather import Batch
from telemetry.errors import DataError

_Ready = tuple[pa.Table, Batch]


class LookAhead:
    """Holds at most one batch, prepared or in preparation; any thread may call it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="look-ahead")
        self._work: Future[_Ready | None] | None = None
        self._lock = threading.Lock()

    def begin(self, make: Callable[[], _Ready]) -> None:
        """Start `make` in the thread; the previous batch is dropped."""
        self.settle()
        with self._lock:
            self._work = self._thread.submit(_make_or_none, make)

    def settle(self) -> None:
        """Wait for a preparation that runs; cancel one that has not begun."""
        with self._lock:
            if self._work is not None and self._work.cancel():
                self._work = None
            work = self._work
        if work is not None:
            wait([work])

    def batch_of(self, rows: pa.Table) -> Batch | None:
        """The prepared batch, if it has these rows, else None; either way no batch is held afterwards."""
        self.settle()
        with self._lock:
            work, self._work = self._work, None
        ready = work.result() if work is not None else None
        return ready[1] if ready is not None and ready[0].equals(rows) else None


def _make_or_none(make: Callable[[], _Ready]) -> _Ready | None:
    try:
        return make()
    except DataError:
        return None
