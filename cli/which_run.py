"""How commands that only read are told which run: by name, else the latest."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from storage.runs import LATEST, resolve_run

Run = Annotated[str, Parameter(help="Name of the run; 'latest': the one that was at work last.")]


def which_run(run: str, runs_root: Path) -> str:
    """The run's name; said on standard error where it was not given.

    Raises:
        InputError: see `resolve_run`.
    """
    chosen = resolve_run(runs_root, run)
    if run == LATEST:
        sys.stderr.write(f"run {chosen}, the latest in {runs_root}\n")
    return chosen
