"""Lets a flow continue when the Prefect worker that started it is killed, although the worker reads its output.

A write to a closed pipe raises an error in the writing thread, and rich, which Prefect uses for its log, then asks the process to
exit. So the output goes through pipes of this process, which stay open. A thread copies it to the worker while the worker lives.
No part of a run depends on its output; the next worker and the server see the run by its heartbeats.
"""

import atexit
import os
import threading
from functools import cache

_AT_MOST_S = 2.0
"""Seconds that the exiting process waits for the last lines; a child process may keep a pipe open for longer."""


@cache  # a process may open several runs
def outlive_worker() -> None:
    """Keep the output of this process and of its children writable, if a Prefect worker started it."""
    if "PREFECT__FLOW_RUN_ID" in os.environ:
        for descriptor in (1, 2):
            _relay(descriptor)


def _relay(descriptor: int) -> None:
    to_worker = os.dup(descriptor)
    reader, writer = os.pipe()
    os.dup2(writer, descriptor)
    os.close(writer)
    thread = threading.Thread(target=_copy, args=(reader, to_worker), name=f"output-{descriptor}", daemon=True)
    thread.start()
    atexit.register(_finish, descriptor, to_worker, thread)


def _copy(reader: int, to_worker: int) -> None:
    """Copy until the pipe is closed. After the first failed write, output is dropped."""
    while data := os.read(reader, 65_536):
        try:
            while data:
                data = data[os.write(to_worker, data) :]
        except OSError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), to_worker)


def _finish(descriptor: int, to_worker: int, thread: threading.Thread) -> None:
    """Copy the last lines; later output goes to the worker directly."""
    os.dup2(to_worker, descriptor)
    thread.join(_AT_MOST_S)
