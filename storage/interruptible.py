"""Runs a DuckDB query that a signal, Ctrl-C or a time limit can end.

DuckDB runs in C, and Python handles no signal meanwhile. So the query runs in a thread, and the caller's thread waits where
signal handlers run. An exception there interrupts the query.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import duckdb

from entente.telemetry.errors import InputError

THREAD = "entente-question"
_Found = TypeVar("_Found")


def run_interruptible(
    connection: duckdb.DuckDBPyConnection, work: Callable[[duckdb.DuckDBPyConnection], _Found], *, seconds: float, late: str
) -> _Found:
    """The result of `work`, which asks the connection.

    Raises:
        InputError: it takes longer than `seconds`; the sentence is `late`.
        Exception: what the work, or a signal handler, raised.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
    answer = pool.submit(work, connection)
    try:
        return answer.result(timeout=seconds)
    except TimeoutError as error:
        raise error if answer.done() else InputError(late) from None
    finally:
        while not answer.done():  # an interrupt before the query has begun has no effect
            connection.interrupt()
            wait([answer], timeout=0.05)
        pool.shutdown()
