"""`entente runs`: the list of runs, and the commands that inspect one, replay a step, continue a game, or remove old files."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from entente.cli.options import RunsRoot
from entente.cli.terminal import cell, output_console, print_json
from entente.inference.memory_plan import size_text
from entente.telemetry.progress import shown

if TYPE_CHECKING:
    from entente.reports.read_run import RunLine

app = App(name="runs")
app.command("entente.cli.inspect:app", name="inspect")
app.command("entente.cli.explain:explain", name="explain")
app.command("entente.cli.replay_step:replay_step", name="replay-step")
app.command("entente.cli.what_if:what_if", name="what-if")
app.command("entente.cli.clean:clean", name="clean")


@app.default
def runs(
    *,
    runs_root: RunsRoot = Path("runs"),
    json: Annotated[bool, Parameter(help="Print one JSON object per line, one for each run.", negative="")] = False,
) -> None:
    """List the runs: state, steps, scores of base and trained model, decisions, size, and the time of the last write.

    The last line is the latest run, the default of --run. Scores are centres gained over evaluation.horizon_years.

    Examples

        entente runs

        entente runs --json
    """
    from entente.reports.read_run import list_runs

    listed = list_runs(runs_root)
    if json:
        for line in listed:
            print_json(asdict(line))
        return
    if not listed:
        print(f"there is no run in {runs_root} yet: begin one with `entente train`")
        return
    console = output_console(1000)  # a file or a pipe takes all columns
    console.print(_table(listed, console))
    for line in listed:
        if line.trouble:
            console.print(f"{shown(line.name)} is damaged: {shown(line.trouble)}", markup=False, soft_wrap=True, style="yellow")


def _table(listed: "list[RunLine]", console: Console) -> Table:
    """Drops columns until the table fits. Never cuts names, because other commands need them."""
    columns: dict[str, list[str | Text]] = {
        "run": [cell(line.name) for line in listed],
        "state": [line.state for line in listed],
        "steps": [f"{line.done} of {line.planned}" if line.planned else "" for line in listed],
        "base": [_score(line.base_score) for line in listed],
        "trained": [_score(line.trained_score) for line in listed],
        "decisions": [f"{line.decisions:,}" for line in listed],
        "size": [size_text(line.size) for line in listed],
        "last written": [time.strftime("%Y-%m-%d %H:%M", time.localtime(line.written)) for line in listed],
    }
    for title in ("", "decisions", "base", "last written", "size", "trained", "steps", "state"):
        columns.pop(title, None)
        table = Table(box=None, padding=(0, 2, 0, 0))
        for each in columns:
            to_left = each in ("run", "state", "last written")
            table.add_column(each, justify="left" if to_left else "right", no_wrap=each != "run")
        for row in zip(*columns.values(), strict=True):
            table.add_row(*row)
        if console.measure(table, options=console.options.update(width=100_000)).maximum <= console.width:
            break
    return table


def _score(score: float | None) -> str:
    return "" if score is None else f"{score:+.2f}"
