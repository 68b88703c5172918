"""`entente sweep`: train the runs of a sweep's file in one process, and compare their settings."""

import json as jsonlib
import sys
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from cli.dry_run import show_plan
from cli.options import AsJson, DryRun, RunsRoot
from cli.prefect_server import prefect_server
from cli.run_flow import run_flow
from cli.screen import progress_shown
from cli.terminal import cell, output_console
from evaluation.intervals import Estimate, format_interval
from pipeline.sweep import Sweep, SweepState, read_sweep
from pipeline.sweep_results import SettingResult, seeds_wanted, sweep_results
from storage.run_roots import as_given
from telemetry.errors import InputError, TrainingError

_COLUMNS = 120
"""Width of the table where there is no terminal."""


def sweep(
    file: Annotated[Path, Parameter(help="TOML file of the sweep: name, seeds, search, and values for settings.")],
    *,
    runs_root: RunsRoot = Path("runs"),
    resume: Annotated[bool, Parameter(help="Continue a sweep that was begun; finished runs are kept.", negative="")] = False,
    table: Annotated[bool, Parameter(help="Only show the result so far.", negative="")] = False,
    json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Train runs that differ in some settings and in their seed, in one process, and say which setting played better.

    The runs are ordinary runs, named after the sweep. They share the engine, state cache, base model and the base's score where
    the settings allow it. After Ctrl-C or a crash, the same command with --resume continues.

    Examples

        entente sweep sweep.toml --dry-run       the runs, and what they share

        entente sweep sweep.toml

        entente sweep sweep.toml --resume        after Ctrl-C, a crash, or a run that failed

        entente sweep sweep.toml --table --json
    """
    state = SweepState(read_sweep(file), runs_root)
    if dry_run:
        return show_plan(_plan(state), json=json)
    if resume or table:
        state.resume()
    if not table:
        _train(state, file, resume=resume)
    results = sweep_results(state)
    _show(state.sweep, results)
    if sentence := seeds_wanted(state):
        print(sentence)
    if json:
        print(jsonlib.dumps({"sweep": state.sweep.name, "settings": [each.to_json() for each in results]}))
    if state.failed and not table:
        raise TrainingError(f"{len(state.failed)} of {len(state.runs)} runs failed; --resume tries them again")


def _train(state: SweepState, file: Path, *, resume: bool) -> None:
    from flows.open_run import check_inputs
    from flows.train_sweep import train_sweep

    if not resume:
        for run in state.runs:
            check_inputs(run.settings)
        state.begin()
    try:
        with prefect_server(), progress_shown():
            run_flow(train_sweep(state))
    except BaseException as error:
        if not isinstance(error, InputError):
            root = "" if state.file.parent.parent == Path("runs") else f" --runs-root {as_given(state.file.parent.parent)}"
            sys.stderr.write(f"finished steps are kept; continue with: entente sweep {file}{root} --resume\n")
        raise


def _plan(state: SweepState) -> dict[str, Any]:
    """The runs, and what they share."""
    runs = [run.settings for run in state.runs]
    shared = {
        "state caches": len({run.cache.model_dump_json() for run in runs}),
        "base models": len({(run.inference.model, str(run.tiny_model), str(run.prompts)) for run in runs}),
        "scores of the base": len({run.base_question for run in state.runs}),
        "engines": 1 + sum(one.inference != other.inference for one, other in pairwise(runs)),
    }
    steps = sum(run.steps for run in runs)
    listed = {
        run.name: ", ".join(f"{name} {value}" for name, value in {"seed": run.settings.seed, **points}.items())
        for run in state.runs
        for points in [state.sweep.points[run.point]]
    }
    work = {"search": state.sweep.search, "runs": len(runs), "steps at most": steps}
    return {"command": "sweep", "work": work, "made once for all": shared, "runs": listed}


def _show(plan: Sweep, results: list[SettingResult]) -> None:
    """Print the table of settings."""

    def text(found: Estimate | None) -> str:
        return "" if found is None else f"{found.mean:+.3f} {format_interval(found.interval, '+.3f')}"

    shown = Table(box=None, padding=(0, 2, 0, 0))
    for name in (*plan.settings, "steps", "seeds", "score", "over the first", "seeds to show it"):
        shown.add_column(name, overflow="fold")
    for each in results:
        seeds = f"{each.score.clusters if each.score else 0} of {len(each.runs)}"
        figures = (str(each.steps), seeds, text(each.score), text(each.over_first), str(each.seeds_to_show or ""))
        shown.add_row(*(cell(str(value)) for value in each.values.values()), *map(cell, figures))
    output_console(_COLUMNS).print(shown)
    for name, why in {name: why for each in results for name, why in each.failed.items()}.items():
        print(f"{name} failed: {why}")
