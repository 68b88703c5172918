"""A pool of worker processes, started at the first call, which end with this process.

Their state is in files: if one dies, the calls in progress fail, and the next call starts new ones."""

import asyncio
import errno
import multiprocessing
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, Self, TypeVar

from entente.telemetry.child import end_with_parent
from entente.telemetry.errors import EngineError

T = TypeVar("T")


class ProcessPool:
    """Owns up to `size` processes; any thread may call it."""

    def __init__(self, processes: int) -> None:
        self.size = processes
        self._lock = threading.Lock()
        self._pool = self._start()

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """The future raises BrokenProcessPool if a process dies."""
        with self._lock:
            try:
                return self._pool.submit(work, *arguments)
            except BrokenProcessPool:
                self._pool = self._start()
                return self._pool.submit(work, *arguments)

    async def ask(self, work: Callable[..., T], *arguments: Any) -> T:
        """Raises EngineError if a process dies."""
        try:
            return await asyncio.wrap_future(self.submit(work, *arguments))
        except BrokenProcessPool as error:
            raise EngineError("a worker process died; is the memory full? Run the command again") from error

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)  # the event loop goes on meanwhile

    def _start(self) -> ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")  # a fork would copy the engine's threads in any state
        try:
            return ProcessPoolExecutor(self.size, mp_context=spawn, initializer=_begin)
        except OSError as error:
            needs = "more open files (ulimit -n)" if error.errno == errno.EMFILE else "a writable /dev/shm for semaphores"
            raise EngineError(f"worker processes cannot start ({error.strerror}): they need {needs}") from error


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends this process
    end_with_parent()
