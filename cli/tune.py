"""`entente bench tune`: which engine settings draw the most decisions here, with the adapter on."""

import json as jsonlib
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cli.options import AsJson, DryRun, which_run
from cli.settings_from_flags import ConfigFiles
from pipeline.tune_engine import TuneSettings
from telemetry.errors import EngineError, InputError


def tune(
    *,
    run: Annotated[str, Parameter(help="Run whose prompts, masks and adapter are measured with.")] = "latest",
    config: ConfigFiles = None,
    output: Annotated[Path | None, Parameter(help="Folder of the results; default: one named after the run.")] = None,
    runs_root: Annotated[Path, Parameter(help="Folder of all runs; results lie in _tuning beside them.")] = Path("runs"),
    json: AsJson = False,
    dry_run: DryRun = False,
    tuning: Annotated[TuneSettings | None, Parameter(name="*", consume_multiple=True, help="The grid and the limits.")] = None,
) -> None:
    """Find the engine settings that draw the most decisions per second within limits of latency and cache hits.

    Each candidate is measured in its own process; the run's settings are one of them. Figures are kept: the same command
    continues after an interruption, and measures only what has no figures yet.

    Examples

        entente bench tune --run mine                       what the run asks, a few minutes

        entente bench tune --run mine --dry-run             which candidates, and which are measured

        entente bench tune --run mine --max-sequences 128 256 512 --max-batched-tokens 4096 8192 16384 --concurrency 128 256

        entente bench tune --run mine --max-batched-tokens 4096 8192 --max-latency-ms 5000 --json

        entente train --config runs/_tuning/mine/tuned.toml
    """
    from pipeline.run_settings import resumed_settings
    from pipeline.tune_engine import plan_tuning

    tuning, run = tuning or TuneSettings(), which_run(run, runs_root)
    settings = resumed_settings(config or (), {"run": run, "runs_root": runs_root})
    plan = plan_tuning(run, settings, tuning, output)
    if dry_run:
        from cli.dry_run import show_plan

        return show_plan(plan.describe(), json=json)
    from cli.prefect_server import prefect_server
    from cli.run_flow import run_flow
    from cli.screen import progress_shown
    from flows.tune_inference import tune_inference

    with prefect_server(), progress_shown():
        outcome = run_flow(tune_inference(run, settings, tuning, runs_root, output))
    _show_rows(outcome["rows"])
    for label, failure in outcome["failed"].items():
        print("\n".join([f"\n{label}: its log ends:", *(f"    {line}" for line in failure["log"].splitlines())]))
    if json:
        print(jsonlib.dumps(outcome))
    if outcome["chosen"] is None:
        nothing = len(outcome["failed"]) == len(outcome["rows"])
        raise (
            EngineError(f"{outcome['why']}: {next(iter(outcome['failed'].values()))['why']}")
            if nothing
            else InputError(outcome["why"])
        )
    if not json:
        print(f"\n{outcome['why']}\nuse them: entente train --config {outcome['toml']}")


def _show_rows(rows: list[dict[str, str]]) -> None:
    from rich.table import Table

    from cli.terminal import output_console

    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in rows[0]:
        is_text = heading in ("candidate", "note")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=heading != "note")
    for row in rows:
        table.add_row(*row.values(), style="bold" if row["note"] == "chosen" else None)
    output_console(180).print(table)
