"""Options that several commands share, and the choice of the run that a reading command takes."""

import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from entente.telemetry.errors import InputError
from storage.runs import LATEST, resolve_run, runs_in

Run = Annotated[str, Parameter(help="Name of the run; 'latest': the run that was written last.")]
RunsRoot = Annotated[Path, Parameter(help="Folder of all runs.")]
AsJson = Annotated[bool, Parameter(help="Print the result as one JSON object, on the last line.", negative="")]
DryRun = Annotated[
    bool, Parameter(name="--dry-run", help="Check everything and show the plan; start and write nothing.", negative="")
]
PlanAsJson = Annotated[bool, Parameter(help="With --dry-run: print the plan as one JSON object.", negative="")]


def which_run(run: str, runs_root: Path) -> str:
    """The name of the run. It is written to standard error where `run` is "latest"."""
    chosen = resolve_run(runs_root, run)
    if run == LATEST:
        sys.stderr.write(f"run {chosen}, the latest in {runs_root}\n")
    return chosen


def which_runs(wanted: Iterable[str], runs_root: Path) -> list[str]:
    """The names of several runs, each once, in the order in which they are wanted; those of a pattern by name.

    Args:
        wanted: names, patterns such as 'sweep-*', or several of them with commas.
    """
    there = sorted(paths.root.name for paths in runs_in(runs_root))
    found: dict[str, None] = {}
    for word in (word for words in wanted for word in words.split(",") if word):
        if word == LATEST:
            found[which_run(word, runs_root)] = None
            continue
        matching = [word] if word in there else [name for name in there if fnmatchcase(name, word)]
        if not matching:
            known = f"; runs there: {', '.join(there[-5:])}" if there else ""
            raise InputError(f"no run in '{runs_root}' is called '{word}'{known}")
        found |= dict.fromkeys(matching)
    return list(found)
