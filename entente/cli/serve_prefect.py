"""Main of a Prefect server that `entente` starts: serves on an inherited socket until SIGTERM.

    python -m entente.cli.serve_prefect FD PARENT    the server of one command, without pages and schedules; ends with PARENT
    python -m entente.cli.serve_prefect FD           the server of `entente up`

It collects garbage in a thread of its own. Python collects in whatever thread allocates, in a server mostly the event loop.
Finalising a database statement waits for the thread that uses its connection. Where SQLite's database is locked, that thread
waits for a transaction that only the event loop can end, until SQLite gives up after a minute with "database is locked".

Prefect's login page shows errors before anything is typed, because it first asks the API without a key. So the server of
`entente up` has a page of its own, `/enter`, that stores the key where Prefect's pages look for it, and goes to them.
"""

import gc
import os
import socket
import sys
import threading
import time
from typing import Any

from entente.telemetry.parent import end_with_parent

BEAT_S = 0.5
_OFTEN, _SELDOM = 10, 120
"""Beats between two collections of the middle and of the oldest generation."""
ENTER = "/enter"
# `prefect-password` is where the pages of Prefect 3.7.7, the pinned version, keep the key. Pages that look elsewhere ask for it.
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Entente</title><link rel="icon" href="data:,">
<style>:root { color-scheme: light dark } body { font: 1rem system-ui, sans-serif; margin: 20vh auto; max-width: 26rem }
input, button { font: inherit; padding: .5rem; width: 100%; box-sizing: border-box; margin-top: .8rem }</style></head>
<body><form><label>The key that <code>entente up</code> printed
<input type="password" autocomplete="current-password" autofocus required></label><button>Enter</button></form>
<script>
const enter = key => { localStorage.setItem("prefect-password", btoa(key)); location.replace("/dashboard") };
if (location.hash.length > 1) enter(decodeURIComponent(location.hash.slice(1)));
document.forms[0].onsubmit = event => { event.preventDefault(); enter(document.querySelector("input").value.trim()) };
</script></body></html>"""


def collect_in_thread() -> threading.Thread:
    """Start the thread that collects garbage; it runs until the process ends."""
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


def application() -> Any:
    """Prefect's server, and the page `/enter`."""
    from prefect.server.api.server import create_app
    from starlette.responses import HTMLResponse

    prefect, page = create_app(), HTMLResponse(_PAGE, headers={"Cache-Control": "no-store"})

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        is_ours = scope["type"] == "http" and scope["path"] == ENTER
        await (page if is_ours else prefect)(scope, receive, send)

    return answer


def main(descriptor: int, parent: int | None = None) -> None:
    """Serve until SIGTERM, or until the process `parent` ends."""
    os.umask(0o077)  # the database has the parameters of all runs
    if parent is not None:
        end_with_parent(gently=True, parent=parent)
        os.environ |= {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_UI_ENABLED": "0"}
    collect_in_thread()
    os.environ["PREFECT__SERVER_FINAL"] = "1"
    import uvicorn

    config = uvicorn.Config(application, factory=True, log_level="error", lifespan="on", timeout_graceful_shutdown=3)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
