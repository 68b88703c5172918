"""Main of a Prefect server that `entente` starts: serves on an inherited socket until SIGTERM.

    python -m entente.prefect_server.serve FD PARENT    the server of one command, without UI and schedules; ends with PARENT
    python -m entente.prefect_server.serve FD           the server of `entente up`

Garbage is collected in a separate thread. In the event loop, finalising a database statement waits for the thread that uses
its connection; if SQLite is locked, that thread waits for a transaction that only the event loop can end, until SQLite fails
after a minute with "database is locked".
"""

import gc
import os
import socket
import sys
import threading
import time

from entente.telemetry.child import end_with_parent

BEAT_S = 0.5
_OFTEN, _SELDOM = 10, 120
"""Beats between collections of the middle and of the oldest generation."""


def collect_in_thread() -> threading.Thread:
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


def main(descriptor: int, parent: int | None = None) -> None:
    os.umask(0o077)  # the database has the parameters of all runs
    if parent is not None:
        end_with_parent(gently=True, parent=parent)
        os.environ |= {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_UI_ENABLED": "0"}
    collect_in_thread()
    os.environ["PREFECT__SERVER_FINAL"] = "1"
    import uvicorn
    from prefect.server.api.server import create_app

    config = uvicorn.Config(create_app, factory=True, log_level="error", lifespan="on", timeout_graceful_shutdown=3)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
