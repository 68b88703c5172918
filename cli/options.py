"""Options that several commands share, and the choice of the run that a reading command takes."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from storage.runs import LATEST, resolve_run

Run = Annotated[str, Parameter(help="Name of the run; 'latest': the run that was written last.")]
RunsRoot = Annotated[Path, Parameter(help="Folder of all runs.")]
AsJson = Annotated[bool, Parameter(help="Print the result as one JSON object, on the last line.", negative="")]
DryRun = Annotated[
    bool, Parameter(name="--dry-run", help="Check everything and show the plan; start and write nothing.", negative="")
]
PlanAsJson = Annotated[bool, Parameter(help="With --dry-run: print the plan as one JSON object.", negative="")]


def which_run(run: str, runs_root: Path) -> str:
    """The name of the run. It is written to standard error where `run` is "latest".

    Raises:
        InputError: see `resolve_run`.
    """
    chosen = resolve_run(runs_root, run)
    if run == LATEST:
        sys.stderr.write(f"run {chosen}, the latest in {runs_root}\n")
    return chosen
