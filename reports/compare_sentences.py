"""Says what a comparison of runs found. A difference is claimed only where its interval excludes 0. Pure functions."""

import shlex
from pathlib import Path

from evaluation.intervals import describe_shortage, format_interval
from reports.compared import Compared, ComparedRun, Paired

HEADLINE = "trained"
"""Label of the score that decides which run is stronger."""


def verdicts(found: Compared) -> list[str]:
    """For each other run: whether its last version is stronger than the first run's."""
    first = found.runs[0]
    headline = {pair.other: pair for pair in found.paired if pair.label == HEADLINE}
    return [paired(headline[run.name], first.name) if run.name in headline else _unscored(first, run) for run in found.runs[1:]]


def paired(pair: Paired, first: str) -> str:
    """One paired difference in words."""
    ours, theirs = (f"{name} (version {version})" for name, version in zip((first, pair.other), pair.versions, strict=True))
    if isinstance(pair.found, str):
        return f"The scores '{pair.label}' of {first} and {pair.other} cannot be paired: {pair.found}."
    difference, starts = pair.found.difference, f"the same {pair.found.forks:,} starts against {pair.opponents}"
    interval = difference.interval
    if interval is None:
        why = describe_shortage(difference.clusters, "source games")
        return f"From {starts}, {theirs} and {ours} are {difference.mean:+.2f} centres apart, without an interval: {why}."
    if interval == (0, 0):
        return f"{theirs} and {ours} gain as much from {starts}, on the average of every source game."
    bounds = f"95 % interval {format_interval(interval, '+.2f')} over {difference.clusters} source games"
    if pair.found.shown:
        more = "more" if difference.mean > 0 else "fewer"
        return f"{theirs} gains {abs(difference.mean):.2f} centres {more} than {ours} from {starts}, {bounds}."
    need = pair.found.forks_to_show
    enough = f"; about {need:,} starts would show a difference of {difference.mean:+.2f}" if need else ""
    return f"{theirs} and {ours} are not told apart by {starts}: {bounds} holds 0{enough}."


def next_commands(found: Compared, runs_root: Path) -> list[tuple[str, str]]:
    """Commands that answer what the files leave open: a reason and the command line."""
    first, root = found.runs[0].name, root_flag(runs_root)
    commands = []
    for pair in found.paired:
        if pair.label == HEADLINE and isinstance(pair.found, str):
            match = f"--players newest,{first}:newest --start held-out --opponents {pair.opponents} --years 1 --measure gained"
            commands.append(
                (
                    f"Measure {pair.other} and {first} from the same positions",
                    f"entente evaluate --run {pair.other} {match}{root}",
                )
            )
    return commands


def root_flag(runs_root: Path) -> str:
    """The flag that names the folder of runs, if it is not the usual one."""
    return "" if runs_root == Path("runs") else f" --runs-root {shlex.quote(str(runs_root))}"


def _unscored(first: ComparedRun, other: ComparedRun) -> str:
    lacking = [run.name for run in (first, other) if HEADLINE not in run.scores]
    return (
        f"{' and '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} no score of a last version yet, so none is compared."
    )
