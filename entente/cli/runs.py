"""`entente runs`: the list of runs, and the commands that look into one, repeat a step, continue a game, or remove old files."""

import json as jsonlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from rich.table import Table

from entente.cli.options import RunsRoot
from entente.cli.terminal import cell, output_console
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
    json: Annotated[bool, Parameter(help="Print one JSON object for each run, a line each.", negative="")] = False,
) -> None:
    """List the runs: state, steps, scores of base and trained model, decisions, size, and when each was written last.

    The last line is the latest run, which commands that read take where --run is left out. Scores are centres gained a game year.

    Examples

        entente runs

        entente runs --json
    """
    from entente.reports.read_run import list_runs

    found = list_runs(runs_root)
    if json:
        for line in found:
            print(jsonlib.dumps(_facts(line)))
        return
    if not found:
        print(f"there is no run in {runs_root} yet: begin one with `entente train`")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("run", "state", "steps", "base", "trained", "decisions", "size", "last written"):
        table.add_column(title, justify="left" if title in ("run", "state", "last written") else "right", no_wrap=title != "run")
    for line in found:
        scores = ("" if score is None else f"{score:+.2f}" for score in (line.base_score, line.trained_score))
        steps = f"{line.done} of {line.planned}" if line.planned else ""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(line.written))
        table.add_row(cell(line.name), line.state, steps, *scores, f"{line.decisions:,}", size_text(line.size), when)
    console = output_console()
    console.print(table)
    for line in found:
        if line.trouble:
            console.print(f"{shown(line.name)} is damaged: {shown(line.trouble)}", markup=False, soft_wrap=True, style="yellow")


def _facts(line: "RunLine") -> dict[str, object]:
    from dataclasses import asdict

    return asdict(line)
