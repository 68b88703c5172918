"""A flow outlives the Prefect worker that started it: a killed worker takes its end of the flow's output along, and nothing else.

Where a write meets a closed pipe, rich, by which Prefect writes its log, asks the process to exit, from whatever thread that was:
raised in the engine's, it ended the engine and left the flow waiting. Nothing of a run lies in its output, so it goes on in
silence; the worker that comes next, and the server, see it by its beats.
"""

import os
import sys

from rich.console import Console


def outlive_worker() -> None:
    """Have this process go on without its output, once that is closed, if a Prefect worker started it."""
    if "PREFECT__FLOW_RUN_ID" in os.environ:
        Console.on_broken_pipe = _go_on_in_silence


def _go_on_in_silence(self: Console) -> None:
    self.quiet = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
