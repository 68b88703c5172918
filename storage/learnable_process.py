"""`PastReturns` and queries over them in a separate process: the caller does not load DuckDB, and its memory does not grow."""

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
    from storage.learnable import PastGroups, PastReturns

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

    def before(self, producer: str, start_group: int) -> dict[str, "PastGroups"]:
        """See `PastReturns.before`."""
        return self._call(_before, producer, start_group)

    def ask_closed(self, query: str, **of_query: Any) -> list[tuple[Any, ...]]:
        """See `closed_query.ask_closed`."""
        return self._call(_ask_closed, query, of_query)

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


def _before(producer: str, start_group: int) -> "dict[str, PastGroups]":
    return _mine.before(producer, start_group)


def _ask_closed(query: str, of_query: dict[str, Any]) -> list[tuple[Any, ...]]:
    from storage.closed_query import ask_closed

    return ask_closed(query, **of_query)
