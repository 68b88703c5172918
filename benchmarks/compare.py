"""Runs all benchmarks in their quick forms and compares their figures with stored ones.

Each benchmark is a process of the `entente` command, so that none inherits caches or threads. Only figures with a target are
judged: others depend on the machine. A figure is worse if it changed for the worse by more than the tolerance, a share of its
earlier value. If smaller is better and the earlier value was nearly 0, the share is of a tenth of the target instead. A figure
that is missing or NaN is worse. A figure that either outcome calls scaled down is shown and not judged.
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
    "storage": ("--scale", "0.05", "--rounds", "3"),
    "trainer": (
        *("--only", "recorded", "--only", "g2", "--only", "g6", "--only", "exactness", "--only", "planner"),
        *("--repeats", "1"),
    ),
    "decode": ("--rounds", "1"),
    "rollout": ("--rounds", "2"),
    "e2e": ("--quick",),
    "orchestration": ("--tasks", "100", "--rounds", "1", "--steps", "0"),
}
"""Benchmark -> arguments of its quick form."""
TAKES_RUNS_ROOT = ("trainer", "decode", "rollout", "e2e")
TAKES_CONFIG = ("trainer", "rollout", "e2e")
TOLERANCE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure, before and now."""

    benchmark: str
    figure: str
    before: float | None
    now: float | None
    judged: bool
    """The figure has a target and an earlier value, and both values are full-size."""
    worse: bool
    """Worse by more than the tolerance."""
    scaled_down: bool = False
    """The figure has a target, and one of its values is of less work than its name says."""

    @property
    def ratio(self) -> float | None:
        """Now over before; None if either is missing or `before` is 0."""
        return self.now / self.before if self.now is not None and self.before else None


def check_names(only: Sequence[str]) -> None:
    """Check names of benchmarks.

    Raises:
        InputError: a name is unknown.
    """
    if unknown := sorted(set(only) - set(QUICK)):
        raise InputError(f"There is no benchmark '{unknown[0]}'; there are {', '.join(QUICK)}.")


def run_all(only: Sequence[str], *, runs_root: Path, config: Sequence[Path] = ()) -> dict[str, Any]:
    """The JSON outcome of each benchmark; that of a failed one has the key `error`.

    Raises:
        InputError: a name is unknown.
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
        message = done.stderr.strip().splitlines() or ["it printed no error"]
        return {"benchmark": name, "error": message[-1], "metrics": {}, "targets": {}}
    return json.loads(lines[-1])


def compare(before: Mapping[str, Any], now: Mapping[str, Any], *, tolerance: float = TOLERANCE) -> list[Line]:
    """Every figure of the benchmarks in `now`, old and new ones."""
    lines = []
    for name, outcome in now.items():
        old = before.get(name, {"metrics": {}, "targets": {}})
        targets = {**old["targets"], **outcome["targets"]}
        scaled_down = {*old.get("scaled_down", ()), *outcome.get("scaled_down", ())}
        for figure in dict.fromkeys([*outcome["metrics"], *old["metrics"]]):
            values = old["metrics"].get(figure), outcome["metrics"].get(figure)
            lines.append(_line(name, figure, *values, targets.get(figure), tolerance, scaled_down=figure in scaled_down))
    return lines


def _line(
    name: str,
    figure: str,
    before: float | None,
    now: float | None,
    target: Mapping[str, float] | None,
    tolerance: float,
    *,
    scaled_down: bool,
) -> Line:
    if target is None or before is None or scaled_down:
        scaled_down = scaled_down and target is not None
        return Line(benchmark=name, figure=figure, before=before, now=now, judged=False, worse=False, scaled_down=scaled_down)
    if now is None:
        worse = True
    elif "at_least" in target:
        worse = not now >= before - tolerance * abs(before)  # "not", so that NaN is worse
    else:
        worse = not now <= before + tolerance * max(abs(before), target["at_most"] / 10)
    return Line(benchmark=name, figure=figure, before=before, now=now, judged=True, worse=worse)


def read_outcomes(file: Path) -> dict[str, Any]:
    """Read the outcomes that `write_outcomes` stored.

    Raises:
        InputError: the file is missing or holds no outcomes.
    """
    try:
        found = json.loads(read_text(file, at_most=LARGEST_RESULT, what="file of figures"))["benchmarks"]
        return {
            name: {
                "metrics": dict(each["metrics"]),
                "targets": dict(each["targets"]),
                "scaled_down": list(each.get("scaled_down", ())),
            }
            for name, each in found.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"'{file}' holds no figures of `entente bench all` ({type(error).__name__}): make one with --out"
        ) from error


def write_outcomes(file: Path, found: Mapping[str, Any]) -> None:
    """Store outcomes for a later comparison."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"benchmarks": found}, indent=1) + "\n")
