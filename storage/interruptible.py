"""Runs DuckDB work that a signal, Ctrl-C or a time limit can interrupt.

DuckDB runs in C, and Python handles no signal meanwhile. So the work runs in a thread, and the caller's thread waits where
signal handlers run. An exception from a handler interrupts the work.
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
"""Seconds to wait for DuckDB after an interrupt, which it checks between two vectors only."""
_Found = TypeVar("_Found")


def run_interruptible(
    open_run: Callable[[], AbstractContextManager[duckdb.DuckDBPyConnection]],
    work: Callable[[duckdb.DuckDBPyConnection], _Found],
    *,
    seconds: float,
    late: str = "",
    cannot_end: Callable[[BaseException], None],
) -> _Found:
    """Open a connection, do the work, close the connection, and return the result of the work.

    Args:
        seconds: time limit of the work.
        late: the sentence where it took longer; empty: that of a question of `entente sql`.
        cannot_end: called with the exception that is about to be raised, if DuckDB did not stop within `STOPS_WITHIN_S` of the
            interrupt; its thread then still runs.

    Raises:
        InputError: the work took longer than `seconds`.
        Exception: what the work, or a signal handler, raised.
    """
    at_work: list[duckdb.DuckDBPyConnection] = []
    listed = threading.Lock()  # a closed connection must not be interrupted
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
        except BaseException as error:  # raised again in the caller's thread
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
        late = late or f"the question was ended after {seconds:g} seconds: ask for less, or give it longer with --max-seconds"
        raised = InputError(late) if isinstance(error, TimeoutError) else error
        try:
            _stop(thread, at_work, listed)
        finally:  # also after a second signal
            if thread.is_alive():
                cannot_end(raised)
        raise raised from None
    thread.join()  # DuckDB must leave the thread before the interpreter shuts down
    return answer


def _stop(thread: threading.Thread, at_work: list[duckdb.DuckDBPyConnection], listed: threading.Lock) -> None:
    """Interrupt repeatedly until the thread ends: an interrupt before the query has begun has no effect."""
    until = time.monotonic() + STOPS_WITHIN_S
    while thread.is_alive() and time.monotonic() < until:
        with listed:
            for connection in at_work:
                connection.interrupt()
        thread.join(0.05)
