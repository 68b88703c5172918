"""`entente explain-step` and `entente explain-run`: who waited for whom, and which setting moves it."""

import json as jsonlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from cli.which_run import Run, which_run
from storage.runs import LATEST
from telemetry.errors import InputError

if TYPE_CHECKING:
    from reports.explain import Explanation

RunsRoot = Annotated[Path, Parameter(help="Folder of all runs.")]
AsJson = Annotated[bool, Parameter(help="Print one JSON object instead.", negative="")]
_WIDTH = 20


def explain_step(
    step: Annotated[int, Parameter(help="Number of the step.")],
    *,
    run: Run = LATEST,
    runs_root: RunsRoot = Path("runs"),
    json: AsJson = False,
) -> None:
    """Where the seconds of one step went, whether it was slower than the others, why, and what to change.

    Example

        entente explain-step 3 --run mine
    """
    from reports.explain import explain_step

    run = which_run(run, runs_root)
    steps, settings = _read(run, runs_root)
    if step not in steps:
        raise InputError(f"run '{run}' has no figures of step {step}: there are those of {min(steps)} to {max(steps)}")
    _show(explain_step(steps, step, settings), json=json)


def explain_run(*, run: Run = LATEST, runs_root: RunsRoot = Path("runs"), json: AsJson = False) -> None:
    """Where the seconds of all steps went, what limits the run, and which setting moves it; also while it trains.

    Example

        entente explain-run --run mine
    """
    from reports.explain import explain_run

    _show(explain_run(*_read(which_run(run, runs_root), runs_root)), json=json)


def _read(run: str, runs_root: Path) -> tuple[Mapping[int, Mapping[str, float]], Mapping[str, Any]]:
    from reports.read_run import read_figures
    from storage.runs import RunPaths

    settings, steps = read_figures(RunPaths(runs_root / run))
    if not steps:
        raise InputError(f"run '{run}' has no whole step yet: there is nothing to explain")
    return steps, settings


def _show(found: "Explanation", *, json: bool) -> None:
    from telemetry.stages import STAGES

    if json:
        print(jsonlib.dumps(found.as_object()))
        return
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    for justify in ("left", "right", "right", "left", "left"):
        table.add_column(justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for part, seconds in found.parts.items():
        bar = "█" * round(_WIDTH * found.share(part))
        shares = f"{found.share(part):.0%}", f"{seconds:,.2f} s"
        table.add_row(part, *shares, f"[cyan]{bar:<{_WIDTH}}[/]", f"[dim]{STAGES[part]}[/]")
    console = Console(highlight=False)
    console.print(f"[bold]{found.title}: {found.seconds:,.1f} s[/]")
    console.print(table)
    for sentence in found.sentences:
        console.print(f"- {sentence}", markup=False)
