"""Work of DuckDB that can be ended: by a signal, by Ctrl-C, and by the clock.

DuckDB runs in C and never lets Python act on a signal. So the work runs in a thread of its own, and the caller's thread waits
where Python's signal handlers run. Whatever a handler raises there interrupts the work.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TypeVar

import duckdb

from telemetry.errors import InputError

STOPS_WITHIN_S = 3.0
"""Seconds that DuckDB gets to end after an interrupt. It looks for one between two vectors only."""
_Found = TypeVar("_Found")


def in_time(
    open_run: Callable[[], AbstractContextManager[duckdb.DuckDBPyConnection]],
    work: Callable[[duckdb.DuckDBPyConnection], _Found],
    *,
    seconds: float,
    cannot_end: Callable[[BaseException], None],
) -> _Found:
    """Open a connection, do the work with it, close it, and return what the work found.

    Args:
        seconds: after these it is interrupted.
        cannot_end: called with what is about to be raised, where DuckDB did not end within `STOPS_WITHIN_S` of its interrupt: its
            thread is then still at work.

    Raises:
        InputError: it took longer than `seconds`.
        Exception: what the work, or a signal handler, raised.
    """
    at_work: list[duckdb.DuckDBPyConnection] = []
    listed = threading.Lock()  # a connection that is closed must not be interrupted
    found: Future[_Found] = Future()

    def run() -> None:
        try:
            with open_run() as connection:
                at_work.append(connection)
                try:
                    answer = work(connection)
                finally:
                    with listed:
                        at_work.clear()
        except BaseException as error:  # raised again in the thread that waits
            found.set_exception(error)
        else:
            found.set_result(answer)

    thread = threading.Thread(target=run, name="entente-question", daemon=True)
    thread.start()
    try:
        answer = found.result(timeout=seconds)
    except BaseException as error:
        if found.done():
            thread.join()
            raise
        late = InputError(f"the question was ended after {seconds:g} seconds: ask for less, or give it longer with --max-seconds")
        raised = late if isinstance(error, TimeoutError) else error
        try:
            _stop(thread, at_work, listed)
        finally:  # a second signal, too, leaves from here
            if thread.is_alive():
                cannot_end(raised)
        raise raised from None
    thread.join()  # the interpreter must not be taken apart around DuckDB's last words in it
    return answer


def _stop(thread: threading.Thread, at_work: list[duckdb.DuckDBPyConnection], listed: threading.Lock) -> None:
    """Interrupt until the thread ends: an interrupt before a query has begun is lost."""
    until = time.monotonic() + STOPS_WITHIN_S
    while thread.is_alive() and time.monotonic() < until:
        with listed:
            for connection in at_work:
                connection.interrupt()
        thread.join(0.05)
