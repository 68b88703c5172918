"""SIGINT and SIGTERM end a command at any moment, in bounded time: one sentence, exit code 130 or 143.

The first signal raises KeyboardInterrupt in the main thread, which closes open resources. A second signal over a second later,
or closing for longer than `ENDS_WITHIN_S`, kills the process and its children; files survive a kill.

A thread keeps the time and reads signals from the interpreter's wakeup pipe, so the limit holds even if the main thread is in
a long call or a library swallowed the KeyboardInterrupt. Libraries with their own handler (uvicorn in `entente serve`) end the
process themselves.
"""

import atexit
import os
import select
import signal
import threading
import time
from types import FrameType

ENDS_WITHIN_S = 30.0
"""Seconds for closing everything after the first signal."""
_SAME_REQUEST_S = 1.0
"""A terminal and a wrapping script may both send a signal for one Ctrl-C."""
_SENTENCES = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM"}
_SHOW_CURSOR = b"\x1b[?25h"

_heard = 0
_nothing_is_open = False
_reported = False


def heard() -> int:
    return _heard


def install() -> None:
    """Handle both signals, also where they were ignored. Call it once, from the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _SENTENCES:
        signal.signal(number, _handle)
    # Registered first, so called last: after it a signal would end the process without our sentence.
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in _SENTENCES])
    threading.Thread(target=_watch, args=(reader,), name="signal-watch", daemon=True).start()


def sentence(number: int) -> str:
    """The line to write for a signal; empty after the first call, so that it is written once."""
    global _reported
    line, _reported = "" if _reported else f"entente: {_SENTENCES[signal.Signals(number)]}\n", True
    return line


def nothing_is_open() -> None:
    """Mark the command as done: from now on the first signal ends the process at once instead of raising KeyboardInterrupt."""
    global _nothing_is_open
    _nothing_is_open = True


def _handle(number: int, _: FrameType | None) -> None:
    global _heard
    if not _heard and not _nothing_is_open:
        _heard = number
        raise KeyboardInterrupt


def _watch(reader: int) -> None:
    first, since = 0, 0.0
    while True:
        left = max(0.0, since + ENDS_WITHIN_S - time.monotonic()) if first else None
        if not select.select([reader], [], [], left)[0]:
            _end_now(first)
        number = os.read(reader, 1)[0]
        if signal.getsignal(number) is not _handle:
            continue
        # `_heard`: the main thread handled this signal, and finished before this thread read it.
        if time.monotonic() > since + _SAME_REQUEST_S if first else _nothing_is_open and not _heard:
            _end_now(first or number)
        if not first:
            first, since = number, time.monotonic()


def _end_now(number: int) -> None:
    """Kill this process and its children; a stopped child would not notice that its parent ended."""
    try:
        import psutil

        for child in psutil.Process().children(recursive=True):
            child.kill()
        os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + sentence(number).encode())
    finally:
        os._exit(128 + number)
