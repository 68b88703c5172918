"""`PastReturns` in a separate process: the caller does not load DuckDB, and its memory does not grow."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, TypeVar

from storage.runs import RunPaths
from telemetry.parent import end_with_parent

if TYPE_CHECKING:
    from storage.learnable import PastReturns

_Found = TypeVar("_Found")


class PastReturnsProcess:
    """`PastReturns` in a separate process.

    The process starts with the first call. If it dies, a new one is started; it holds nothing that is not in files.
    """

    def __init__(self, paths: RunPaths, *, blend: Mapping[str, float], discount: float) -> None:
        """See `PastReturns`."""
        self._arguments = (paths, dict(blend), discount)
        self._process: ProcessPoolExecutor | None = None
        self._lock = threading.Lock()

    def spreads_before(self, producer: str, start_group: int) -> dict[str, float]:
        """See `PastReturns.spreads_before`."""
        return self._call(_spreads_before, producer, start_group)

    def close(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            self._process.shutdown()
            self._process = None

    def _call(self, work: Callable[..., _Found], *arguments: Any) -> _Found:
        with self._lock:
            try:
                return self._call_once(work, arguments)
            except BrokenProcessPool:
                self.close()
                return self._call_once(work, arguments)

    def _call_once(self, work: Callable[..., _Found], arguments: tuple[Any, ...]) -> _Found:
        if self._process is None:
            spawn = multiprocessing.get_context("spawn")
            self._process = ProcessPoolExecutor(1, mp_context=spawn, initializer=_open, initargs=self._arguments)
        return self._process.submit(work, *arguments).result()


_mine: "PastReturns"
"""In the separate process: its `PastReturns`."""


def _open(paths: RunPaths, blend: Mapping[str, float], discount: float) -> None:
    global _mine
    from storage.learnable import PastReturns

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends this process
    end_with_parent()
    _mine = PastReturns(paths, blend=blend, discount=discount)


def _spreads_before(producer: str, start_group: int) -> dict[str, float]:
    return _mine.spreads_before(producer, start_group)
