"""`entente watch`: the figures of a run on one screen. It only reads files, so it works from another terminal or machine."""

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from entente.cli.options import Run, RunsRoot, which_run
from entente.telemetry.progress import shown
from storage.runs import LATEST, RunPaths

if TYPE_CHECKING:
    from entente.reports.read_run import RecordedRun

_TICKS = "▁▂▃▄▅▆▇█"
_WIDTH, _ALERTS = 32, 4


def watch(
    *,
    run: Run = LATEST,
    runs_root: RunsRoot = Path("runs"),
    interval_s: Annotated[
        float, Parameter(help="Seconds between two updates.", validator=validators.Number(gt=0, lte=86_400))
    ] = 2.0,
    once: Annotated[bool, Parameter(help="Print one screen and exit.", negative="")] = False,
) -> None:
    """Watch a run: progress, curves, where its time goes, and alerts. It only reads the run's files.

    Stops when the run is done, or with Ctrl-C, which does not affect the run.

    Examples

        entente watch --run mine

        entente watch --run mine --once
    """
    from entente.reports.read_run import MetricsFile, read_run

    paths, console = RunPaths(runs_root / which_run(run, runs_root)), Console(highlight=False)
    metrics = MetricsFile(paths.metrics)
    progress = read_run(paths, metrics)
    if once or not console.is_terminal:
        console.print(_screen(progress))
        return
    with Live(_screen(progress), console=console, refresh_per_second=4) as live:
        while not progress.is_over:
            time.sleep(interval_s)
            progress = read_run(paths, metrics)
            live.update(_screen(progress))


def _screen(run: "RecordedRun") -> RenderableType:
    from entente.reports.newest import curves, progress, stage_shares

    parts: list[RenderableType] = [Text(shown(progress(run)), style="bold")]
    if run.steps:
        table, times = (Table(box=None, padding=(0, 1), show_header=False) for _ in range(2))
        for title, values, words in curves(run):
            table.add_row(title, Text(sparkline(values, _WIDTH), style="cyan"), words)
        for stage, share in stage_shares(run).items():
            times.add_row(stage, Text(f"{'█' * round(_WIDTH * share):<{_WIDTH}}", style="cyan"), f"{share:.0%}")
        parts += [table, Text("where the time goes", style="bold"), times]
    parts += [Text(shown(line), style="yellow") for line in run.alerts[-_ALERTS:]]
    return Group(*parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """The curve of `values` in at most `width` characters, each the mean of a range, scaled from lowest to highest."""
    width = min(width, len(values))
    bounds = [len(values) * place // width for place in range(width + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        return _TICKS[0] * width
    return "".join(_TICKS[round((value - low) / (high - low) * (len(_TICKS) - 1))] for value in means)
