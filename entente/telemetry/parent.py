"""Ends a child process when its parent ends, however the parent ended, so that no process or port is left.

For children that this program starts. Watching the parent's process id needs no signal from it, so it also sees a kill -9.

    python -m entente.telemetry.parent MODULE ARGUMENTS     runs a module of others, which ends when its standard input closes
"""

import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time

_LOOK_EVERY_S = 0.5
_GRACE_S = 5.0


def end_with_parent(*, gently: bool = False, parent: int = 0) -> None:
    """From this call on, end this process within a second of its parent's end.

    Args:
        gently: ask with SIGTERM first, and insist after five seconds; else end at once, which a process whose files are safe
            against a kill at any moment can afford.
        parent: process id of the parent. A child that `multiprocessing` did not start needs it, in case the parent ended while
            the child still imported modules; 0 takes whoever is the parent now.
    """
    started_by = multiprocessing.parent_process()
    parent = parent or (os.getppid() if started_by is None or started_by.pid is None else started_by.pid)
    threading.Thread(target=_watch, args=(parent, gently), name="parent-watch", daemon=True).start()


def end_with_pipe() -> None:
    """From this call on, end this process group once its parent, which holds the other end of standard input, has closed it."""
    threading.Thread(target=_wait_for_end, name="parent-watch", daemon=True).start()


def _wait_for_end() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def _watch(parent: int, gently: bool) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    if gently:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    end_with_pipe()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
