"""What tests with processes and servers do while they wait: ask again, find a port, kill."""

import asyncio
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import pytest

Found = TypeVar("Found")


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something holds, and fail if it never does."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)


def wait_for(what: str, limit_s: float, ask: Callable[[], Any], meanwhile: Callable[[], None] = lambda: None) -> Any:
    """Ask once a second until there is an answer.

    Raises:
        TimeoutError: there was none in time.
    """
    until = time.monotonic() + limit_s
    while not (answer := ask()):
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {limit_s:.0f} s")
        meanwhile()
        time.sleep(1)
    return answer


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def kill(pid: int) -> None:
    """Kill a process; one that has ended is none."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


class _NoWaits(selectors.DefaultSelector):
    """Instead of waiting until the next timer, moves the clock there. Work in threads must not be waited for."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "nothing is left that could happen"
            self.now += timeout
        return found


def run_in_virtual_time(work: Coroutine[Any, Any, Found], *modules: ModuleType) -> Found:
    """Run `work` in an event loop whose timers cost no time, so that the order of events does not depend on the machine.

    Functions for threads are called in place. `time.monotonic` and `time.time` in `modules` are the loop's clock.
    """
    selector = _NoWaits()
    loop = asyncio.SelectorEventLoop(selector)

    async def in_place(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=lambda: loop) as runner:
        patch.setattr(loop, "time", lambda: selector.now)
        patch.setattr(asyncio, "to_thread", in_place)
        for module in modules:
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: selector.now, time=lambda: selector.now))
        return runner.run(work)
