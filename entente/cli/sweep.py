"""`entente sweep`: train the runs of a sweep file in one process, and compare their settings."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.table import Table

from entente.cli.options import AsJson, DryRun
from entente.cli.run_flow import run_flow
from entente.cli.terminal import cell, output_console, print_json, show_plan
from entente.evaluation.intervals import FEWEST_CLUSTERS, describe_shortage
from entente.reports.write_page import root_flag
from entente.telemetry.errors import InputError, TrainingError
from flows.sweep import (
    Sweep,
    SweepPoint,
    base_question,
    check_name_of_sweep,
    read_sweep,
    result_rows,
    score_of,
    scored_by_others,
    scored_elsewhere,
    sweep_points,
    sweep_results,
    trained_elsewhere,
)
from storage.adapters import published_versions

_COLUMNS = 120


def sweep(
    file: Annotated[Path, Parameter(help="TOML file of the sweep: name, seeds, and values for settings.")],
    *,
    runs_root: Annotated[Path | None, Parameter(help="Folder of all runs; default: that of the settings.")] = None,
    resume: Annotated[bool, Parameter(help="Continue a sweep; if it is done, print its table.", negative="")] = False,
    json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Train runs that differ in some settings and in their seed, in one process, and report which setting played better.

    The runs are ordinary runs, named after the sweep. They share the state cache, base model and base score where the
    settings allow it. After Ctrl-C or a crash, the same command with --resume continues.

    Examples

        entente sweep sweep.toml --dry-run       the runs, and what they share

        entente sweep sweep.toml

        entente sweep sweep.toml --resume        after Ctrl-C, a crash, or a run that failed
    """
    sweep = read_sweep(file)
    points = sweep_points(sweep, runs_root)
    if dry_run:
        return show_plan(_plan(sweep, points, resume=resume), json=json)
    try:
        _train(sweep, points, file, resume=resume)
    finally:
        if isinstance(sys.exception(), TrainingError | None):  # a run failed, and all others are done
            _show(sweep, points, json=json)


def _train(sweep: Sweep, points: Sequence[SweepPoint], file: Path, *, resume: bool) -> None:
    from flows.train_sweep import train_sweep

    try:
        runs = [run for point in points for run in point.runs]
        run_flow(lambda: train_sweep(sweep.name, runs, resume=resume, varied=sweep.settings))
    except BaseException as error:
        if not isinstance(error, InputError):
            where = f"{shlex.quote(str(file))}{root_flag(points[0].runs[0].runs_root)}"
            sys.stderr.write(f"finished steps are kept; continue with: entente sweep {where} --resume\n")
        raise


def _plan(sweep: Sweep, points: Sequence[SweepPoint], *, resume: bool) -> dict[str, Any]:
    from entente.cli.dry_run import check_train

    descriptions = {
        run.run: ", ".join(f"{name} {value}" for name, value in {"seed": run.seed, **point.values}.items())
        for point in points
        for run in point.runs
    }
    runs = [run for point in points for run in point.runs]
    for run in runs:
        check_name_of_sweep(run, sweep.name, resume=resume, varied=sweep.settings)
        check_train(run, resume=run.paths.settings.exists())
    shared = {
        "state caches": len({run.cache.model_dump_json() for run in runs}),
        "base models": len({(run.inference.model, str(run.tiny_model), str(run.prompts)) for run in runs}),
        "base-model scores": len({base_question(run) for run in runs}),
    }
    left = [run for run in runs if score_of(run) is None]
    work = {"runs": len(left), "steps": sum(run.steps - max(published_versions(run.paths), default=0) for run in left)}
    return {"command": "sweep", "work": work, "shared by the runs": shared, "runs": descriptions}


def _show(sweep: Sweep, points: Sequence[SweepPoint], *, json: bool) -> None:
    results = sweep_results(points)
    rows = result_rows(results)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(cell, row.values()))
    output_console(_COLUMNS).print(table)
    if (count := len(sweep.seeds)) < FEWEST_CLUSTERS:
        print(f"no setting can be called better than another: {describe_shortage(count, 'seeds')}")
    if json:
        print_json({"sweep": sweep.name, "settings": results})
    for mixed in filter(None, (scored_by_others(points), scored_elsewhere(points), trained_elsewhere(points))):
        print(mixed)
