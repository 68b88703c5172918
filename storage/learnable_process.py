"""`PastSpreads` in a separate process, so that the caller does not load DuckDB and its memory does not grow."""

import multiprocessing
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from storage.runs import RunPaths
from telemetry.parent import end_with_parent

if TYPE_CHECKING:
    from storage.learnable import PastSpreads


class PastSpreadsProcess:
    """`PastSpreads` in a separate process.

    The process starts with the first call. If it dies, a new one is started; it holds nothing that is not in files.
    """

    def __init__(self, paths: RunPaths, *, blend: Mapping[str, float], discount: float) -> None:
        """See `PastSpreads`."""
        self._arguments = (paths, dict(blend), discount)
        self._process: ProcessPoolExecutor | None = None
        self._lock = threading.Lock()

    def before(self, producer: str, start_group: int) -> dict[str, float]:
        """See `PastSpreads.before`."""
        with self._lock:
            try:
                return self._ask(producer, start_group)
            except BrokenProcessPool:
                self.close()
                return self._ask(producer, start_group)

    def close(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            self._process.shutdown()
            self._process = None

    def _ask(self, producer: str, start_group: int) -> dict[str, float]:
        if self._process is None:
            spawn = multiprocessing.get_context("spawn")
            self._process = ProcessPoolExecutor(1, mp_context=spawn, initializer=_open, initargs=self._arguments)
        return self._process.submit(_before, producer, start_group).result()


_mine: "PastSpreads"
"""In the separate process: its `PastSpreads`."""


def _open(paths: RunPaths, blend: Mapping[str, float], discount: float) -> None:
    global _mine
    from storage.learnable import PastSpreads

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends this process
    end_with_parent()
    _mine = PastSpreads(paths, blend=blend, discount=discount)


def _before(producer: str, start_group: int) -> dict[str, float]:
    return _mine.before(producer, start_group)
