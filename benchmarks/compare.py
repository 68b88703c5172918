"""All benchmarks in their quick forms, and their figures beside those of another time.

Each runs as a process of the `entente` command, so that none inherits another's caches or threads. Compared are the figures that
a target is held against, for those are ratios; all others tell of the machine and are shown without a verdict. A figure is beyond
tolerance when it has become worse by more than that share of what it was; where less is better and it was next to nothing, a
tenth of the target's bound stands for what it was. A figure that is gone, or no number, counts as worse.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telemetry.errors import InputError
from telemetry.progress import reporter
from telemetry.read_file import LARGEST_RESULT, read_text

QUICK: dict[str, tuple[str, ...]] = {
    "game": ("--phases", "200", "--rounds", "2"),
    "cache": ("--positions", "200", "--rounds", "2"),
    "prompts": ("--games", "3"),
    "storage": ("--scale", "0.05", "--rounds", "3"),
    "trainer": ("--only", "g2", "--only", "g6", "--only", "exactness", "--only", "planner", "--repeats", "1"),
    "decode": ("--rounds", "1", "--no-http"),
    "rollout": ("--rounds", "2", "--no-workers"),
    "e2e": ("--quick",),
    "orchestration": ("--tasks", "100", "--rounds", "1", "--steps", "0", "--slow-steps", "0"),
    "paper": ("--steps", "4"),
}
"""Benchmark -> arguments of its quick form."""
TAKES_RUNS_ROOT = ("decode", "rollout", "e2e")
TAKES_CONFIG = ("rollout", "e2e")
TOLERANCE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure then and now."""

    benchmark: str
    figure: str
    before: float | None
    now: float | None
    judged: bool
    """A target tells which way is better."""
    worse: bool
    """Beyond tolerance."""

    @property
    def ratio(self) -> float | None:
        """Now over before; None where either is missing or before is nothing."""
        return self.now / self.before if self.now is not None and self.before else None


def check_names(only: Sequence[str]) -> None:
    """Refuse names of no benchmark.

    Raises:
        InputError: there is none of that name.
    """
    if unknown := sorted(set(only) - set(QUICK)):
        raise InputError(f"There is no benchmark '{unknown[0]}'; there are {', '.join(QUICK)}.")


def run_all(only: Sequence[str], *, runs_root: Path, config: Sequence[Path] = ()) -> dict[str, Any]:
    """The outcome of each benchmark, as its JSON says; one that failed is an object with `error`.

    Raises:
        InputError: there is none of that name.
    """
    check_names(only)
    wanted = [name for name in QUICK if not only or name in only]
    found: dict[str, Any] = {}
    for number, name in enumerate(wanted):
        reporter().stage(f"bench {name}", number, len(wanted))
        arguments = list(QUICK[name])
        arguments += ["--runs-root", str(runs_root)] if name in TAKES_RUNS_ROOT else []
        arguments += [word for file in config for word in ("--config", str(file))] if name in TAKES_CONFIG else []
        began = time.monotonic()
        found[name] = _run(name, arguments)
        reporter().say(f"bench {name}: {found[name].get('error') or 'done'} after {time.monotonic() - began:.0f} s")
    reporter().stage("benchmarks", len(wanted), len(wanted))
    return found


def _run(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "cli.main", "bench", name, *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        return {"benchmark": name, "error": said[-1], "metrics": {}, "targets": {}}
    return json.loads(lines[-1])


def compare(before: Mapping[str, Any], now: Mapping[str, Any], *, tolerance: float = TOLERANCE) -> list[Line]:
    """Every figure of either, in the order of the benchmarks that ran now; benchmarks that did not run are left out."""
    lines = []
    for name, outcome in now.items():
        old = before.get(name, {"metrics": {}, "targets": {}})
        targets = {**old["targets"], **outcome["targets"]}
        for figure in dict.fromkeys([*outcome["metrics"], *old["metrics"]]):
            lines.append(
                _line(name, figure, old["metrics"].get(figure), outcome["metrics"].get(figure), targets.get(figure), tolerance)
            )
    return lines


def _line(
    name: str, figure: str, before: float | None, now: float | None, target: Mapping[str, float] | None, tolerance: float
) -> Line:
    judged = target is not None and before is not None
    worse = False
    if judged and target is not None and before is not None:
        if now is None:
            worse = True
        elif "at_least" in target:
            worse = not now >= before - tolerance * abs(before)
        else:
            worse = not now <= before + tolerance * max(abs(before), target["at_most"] / 10)
    return Line(benchmark=name, figure=figure, before=before, now=now, judged=judged, worse=worse)


def read_outcomes(file: Path) -> dict[str, Any]:
    """Outcomes as `write_outcomes` kept them.

    Raises:
        InputError: the file is not there, or is none.
    """
    try:
        found = json.loads(read_text(file, at_most=LARGEST_RESULT, what="file of figures"))["benchmarks"]
        return {name: {"metrics": dict(each["metrics"]), "targets": dict(each["targets"])} for name, each in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"'{file}' holds no figures of `entente bench all` ({type(error).__name__}): make one with --out"
        ) from error


def write_outcomes(file: Path, found: Mapping[str, Any]) -> None:
    """Keep them for a later comparison."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"benchmarks": found}, indent=1) + "\n")
