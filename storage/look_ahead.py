"""The batch that the next step will likely ask for, made ready by a thread while the step before is computed.

Promise: it decides nothing. Whoever wants a batch says which rows; those that were made ready are handed over only if they are
these very rows in this order, else they are forgotten. What goes wrong with the data meanwhile is left to the step itself, which
meets it again; any other error is raised when the next batch is asked for.
Never: write a ledger, or choose for a step.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pyarrow as pa

from storage.gather import Batch
from telemetry.errors import DataError

_Ready = tuple[pa.Table, Batch]


class LookAhead:
    """At most one batch, made ready or in the making; any thread may ask, and one is handed it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="look-ahead")
        self._work: Future[_Ready | None] | None = None
        self._lock = threading.Lock()

    def begin(self, make: Callable[[], _Ready]) -> None:
        """Let the thread ``make`` rows and their batch; what was made ready before is forgotten."""
        self.settle()
        with self._lock:
            self._work = self._thread.submit(_made, make)

    def settle(self) -> None:
        """Wait for what is in the making; what has not begun is taken back, as waiting for it would gain nothing."""
        with self._lock:
            if self._work is not None and self._work.cancel():
                self._work = None
            work = self._work
        if work is not None:
            wait([work])

    def batch_of(self, rows: pa.Table) -> Batch | None:
        """The batch made ready, if it is of these rows; there is none afterwards."""
        self.settle()
        with self._lock:
            work, self._work = self._work, None
        ready = work.result() if work is not None else None
        return ready[1] if ready is not None and ready[0].equals(rows) else None


def _made(make: Callable[[], _Ready]) -> _Ready | None:
    try:
        return make()
    except DataError:
        return None
