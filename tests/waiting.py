"""What tests with processes and servers do while they wait: ask again, find a port, kill, say where they are."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any


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


def say(line: str) -> None:
    """Say where a long test is."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
