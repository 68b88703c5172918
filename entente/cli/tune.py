"""`entente bench tune`: engine settings that sample the most decisions a second, with the adapter."""

import asyncio
import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from benchmarks.tune_engine import TUNING_FOLDER, TuneSettings, candidates_of, choose, measure_candidates, table_rows, tuned_toml
from entente.cli.options import AsJson, ConfigFiles, which_run
from entente.settings.layers import resumed_settings
from entente.telemetry.errors import EngineError, InputError
from storage.files import durable_write, file_lock


def tune(
    *,
    run: Annotated[str, Parameter(help="Run whose positions and newest adapter are used.")] = "latest",
    config: ConfigFiles = None,
    runs_root: Annotated[Path, Parameter(help="Folder of all runs; results are written to _tuning in it.")] = Path("runs"),
    json: AsJson = False,
    tuning: Annotated[TuneSettings | None, Parameter(name="*", consume_multiple=True, help="Values to try, and limits.")] = None,
) -> None:
    """Find the engine settings that sample the most decisions per second within limits on latency and cache hits.

    Each candidate plays start groups of the run in its own process; the run's settings are one of them.

    Examples

        entente bench tune --run mine                       a few minutes

        entente bench tune --run mine --max-sequences 128 256 512 --max-batched-tokens 4096 8192 16384

        entente bench tune --run mine --max-batched-tokens 4096 8192 --max-latency-ms 5000 --json

        entente train --run mine --resume --config runs/_tuning/mine/tuned.toml
    """
    from entente.cli.terminal import print_json, show_progress
    from entente.reports.write_page import of_run

    tuning, run = tuning or TuneSettings(), which_run(run, runs_root)
    settings = resumed_settings(config or (), {"run": run, "runs_root": runs_root})
    folder, candidates = runs_root / TUNING_FOLDER / run, candidates_of(settings, tuning)
    toml = folder / "tuned.toml"
    with show_progress(), file_lock(folder / ".lock") as alone:
        if not alone:
            raise InputError(f"another command tunes run '{run}', and would get the jobs of this one: wait for it")
        toml.unlink(missing_ok=True)
        measured, failed = asyncio.run(measure_candidates(settings, tuning, candidates, folder))
    chosen, why = choose(measured, tuning)
    rows = table_rows(candidates, measured, failed, chosen, tuning)
    _show_rows(rows)
    for child in failed.values():
        print("\n".join([f"\n{child.why}; its log ends:", *(f"    {line}" for line in child.log.splitlines())]))
    if json:
        print_json({"why": why, "chosen": chosen and chosen.values | dict(measured[chosen]), "rows": rows})
    if chosen is None:
        raise InputError(why) if measured else EngineError(f"{why}: {next(iter(failed.values())).why}")
    files = " ".join(f"--config {shlex.quote(str(file))}" for file in (*(config or ()), toml))
    use = f"entente train {of_run(run, runs_root)} --resume {files}"
    if settings.inference.urls:  # whose servers read none of the run's settings
        flags = (f"--{name.replace('_', '-')} {value}" for name, value in chosen.values.items())
        use = f"start the servers of inference.urls by `entente serve` with {' '.join(flags)}"
    durable_write(toml, tuned_toml(chosen, [use, f"on the machine where it was measured: {why}"]).encode())
    if not json:
        print(f"\n{why}\nuse them: {use}")


def _show_rows(rows: list[dict[str, str]]) -> None:
    from rich.table import Table

    from entente.cli.terminal import output_console

    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in rows[0]:
        is_text = heading in ("candidate", "note")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row.values(), style="bold" if row["note"] == "chosen" else None)
    output_console(180).print(table)
