"""Garbage collected in a thread of its own, for a Prefect server on SQLite.

    python -m cli.collect_aside server start ...        is `prefect server start ...` so

Python collects wherever it happens to be, in a server mostly on the event loop. There it meets statements of connections that
another thread uses at that moment, and finalising one waits for that thread; which, where the database is locked, waits for a
transaction that only the event loop can end. The server then stands still until SQLite gives up, after a minute, and whoever
asked is told that the database is locked. A thread of its own may wait.
"""

import gc
import threading
import time

BEAT_S = 0.5
_OFTEN, _SELDOM = 10, 120
"""Beats between two collections of the middle and of the oldest generation."""


def collect_aside() -> threading.Thread:
    """Begin it, for the rest of the process."""
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
    """`prefect WORDS`."""
    collect_aside()
    from prefect.cli import app

    app()


if __name__ == "__main__":
    main()
