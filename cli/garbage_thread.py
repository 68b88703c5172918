"""Runs garbage collection in its own thread, for a Prefect server on SQLite.

    python -m cli.garbage_thread server start ...        runs `prefect server start ...` this way

Python collects garbage in whatever thread allocates, in a server mostly the event loop. Finalising a database statement waits for
the thread that uses its connection. Where the database is locked, that thread waits for a transaction that only the event loop
can end. Both wait until SQLite gives up after a minute, and the client gets the error "database is locked". A thread of its
own can wait without harm.
"""

import gc
import threading
import time

BEAT_S = 0.5
_OFTEN, _SELDOM = 10, 120
"""Beats between two collections of the middle and of the oldest generation."""


def collect_in_thread() -> threading.Thread:
    """Start the thread; it runs until the process ends."""
    gc.disable()
    thread = threading.Thread(target=_collect, name="garbage", daemon=True)
    thread.start()
    return thread


def _collect() -> None:
    beat = 0
    while True:
        time.sleep(BEAT_S)
        beat += 1
        gc.collect(2 if beat % _SELDOM == 0 else 1 if beat % _OFTEN == 0 else 0)


def main() -> None:
    """Run `prefect` with the arguments of this process."""
    collect_in_thread()
    from prefect.cli import app

    app()


if __name__ == "__main__":
    main()
