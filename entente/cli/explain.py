"""`entente runs explain`: the bottleneck of a run or a step, and the setting that relieves it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from entente.cli.options import AT_LEAST_1, Run, RunsRoot, which_run
from entente.telemetry.errors import InputError
from storage.runs import LATEST, RunPaths

if TYPE_CHECKING:
    from entente.reports.explain import Explanation

_WIDTH = 20


def explain(
    step: Annotated[int | None, Parameter(help="Number of a step; default: all steps together.", validator=AT_LEAST_1)] = None,
    *,
    run: Run = LATEST,
    runs_root: RunsRoot = Path("runs"),
) -> None:
    """Show where the time of a run or of one step went, its bottleneck, and the setting that relieves it; works while it trains.

    For a step, also show whether it was slower than the others, and why.

    Examples

        entente runs explain --run mine

        entente runs explain 3 --run mine
    """
    from entente.reports.explain import explain_run, explain_step

    run = which_run(run, runs_root)
    steps, settings = _read(run, runs_root)
    if step is not None and step not in steps:
        raise InputError(f"run '{run}' has no figures of step {step}: there are those of {min(steps)} to {max(steps)}")
    _show(explain_run(steps, settings) if step is None else explain_step(steps, step, settings))


def _read(run: str, runs_root: Path) -> tuple[Mapping[int, Mapping[str, float]], Mapping[str, Any]]:
    from entente.reports.read_run import read_run

    progress = read_run(RunPaths(runs_root / run))
    if not progress.steps:
        raise InputError(f"run '{run}' has no whole step yet: there is nothing to explain")
    return progress.steps, progress.settings


def _show(explanation: "Explanation") -> None:
    from entente.telemetry.stages import STAGES

    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    for justify in ("left", "right", "right", "left", "left"):
        table.add_column(justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for part, seconds in explanation.parts.items():
        bar = "█" * round(_WIDTH * explanation.share(part))
        shares = f"{explanation.share(part):.0%}", f"{seconds:,.2f} s"
        table.add_row(part, *shares, f"[cyan]{bar:<{_WIDTH}}[/]", f"[dim]{STAGES[part]}[/]")
    console = Console(highlight=False)
    console.print(f"[bold]{explanation.title}: {explanation.seconds:,.1f} s[/]")
    console.print(table)
    for sentence in explanation.sentences:
        console.print(f"- {sentence}", markup=False)
