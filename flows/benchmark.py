"""Flow: run one benchmark in its own process, and show its figures beside the stored baseline.

Figures of different machines cannot be compared, so each machine has its own baseline: its first outcome, until the file is
removed.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from prefect import flow
from prefect.artifacts import acreate_table_artifact

from flows.given_parameters import check_given, named_after
from storage.json_files import kept_object, write_json
from telemetry.errors import EntenteError
from telemetry.progress import reporter

BASELINE_FOLDER = "_benchmarks"
"""Folder under `runs_root`."""
_MACHINE = ("platform", "cpu_cores", "gpus")
"""Facts that must be equal for figures to be comparable."""
_ENDS_WITHIN_S = 1800.0


@flow(name="benchmark", flow_run_name=named_after("benchmark", "name"), timeout_seconds=3600)
async def benchmark(
    name: Literal["game", "cache"] = "game", runs_root: Path = Path("runs"), new_baseline: bool = False
) -> dict[str, Any]:
    """Run `entente bench NAME`. Returns its outcome, with each figure's change against the baseline under "changes".

    Args:
        name: The benchmark; only those that take seconds.
        runs_root: Folder of all runs; the baseline lies beside them.
        new_baseline: Store these figures as the new baseline.
    """
    check_given(runs_root)
    outcome = await _measured(name)
    file = runs_root / BASELINE_FOLDER / f"{name}.json"
    baseline = {} if new_baseline else kept_object(file)
    if not baseline or any(baseline["machine"].get(part) != outcome["machine"].get(part) for part in _MACHINE):
        write_json(file, outcome)
        baseline = outcome
        reporter().say(f"these figures of benchmark '{name}' are the baseline from now on")
    rows = compared(outcome, baseline)
    words = f"Benchmark {name}: each figure beside the baseline in {file}, with its change and its target."
    await acreate_table_artifact(table=rows, key=f"benchmark-{name}", description=words)
    return outcome | {"changes": {row["figure"]: row["change"] for row in rows}}


def compared(outcome: dict[str, Any], baseline: dict[str, Any]) -> list[dict[str, str]]:
    """One row for each figure: value, baseline, change in per cent, and whether its target holds."""
    rows = []
    for figure, value in outcome["metrics"].items():
        before, bounds = baseline["metrics"].get(figure), outcome["targets"].get(figure, {})
        holds = bounds.get("at_least", value) <= value <= bounds.get("at_most", value)
        rows.append(
            {
                "figure": figure,
                "now": f"{value:.4g}",
                "baseline": "" if before is None else f"{before:.4g}",
                "change": f"{value / before - 1:+.1%}" if before else "",
                "target": ", ".join(f"{word.replace('_', ' ')} {bound:g}" for word, bound in bounds.items()),
                "": "" if not bounds else "holds" if holds else "missed",
            }
        )
    return rows


async def _measured(name: str) -> dict[str, Any]:
    """The outcome that the command prints as its last line.

    Raises:
        EntenteError: it failed, or did not end in time.
    """
    words = [sys.executable, "-m", "cli.main", "bench", name, "--json"]
    asked: dict[str, Any] = {"capture_output": True, "text": True, "timeout": _ENDS_WITHIN_S}
    try:
        done = await asyncio.to_thread(subprocess.run, words, env=os.environ | {"OMP_NUM_THREADS": "1"}, **asked)
    except subprocess.TimeoutExpired as late:
        raise EntenteError(f"`entente bench {name}` did not end within {_ENDS_WITHIN_S:g} s") from late
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise EntenteError(f"`entente bench {name}` failed: {said[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
