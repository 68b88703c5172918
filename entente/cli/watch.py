"""`entente watch`: the figures of a run on one screen. It only reads files, so it works from another terminal or machine."""

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from entente.cli.options import Run, RunsRoot, which_run
from entente.telemetry.errors import InputError
from storage.runs import LATEST

if TYPE_CHECKING:
    from entente.reports.read_run import RecordedRun

_TICKS = "▁▂▃▄▅▆▇█"
_CURVES = (
    ("return", "train/reward", "{0:+.3f} centres"),
    ("entropy", "train/entropy", "{0:.3f} nats"),
    ("gradient", "train/grad_norm", "{0:.3g}"),
    ("mismatch", "train/log_ratio_lag0_p99", "{0:.2g} nats"),
    ("lag", "train/policy_lag_p50", "{0:.0f} versions"),
    ("decisions", "train/decisions", "{0:,.0f} a step"),
    ("tokens", "rollout/tokens_per_s", "{0:,.0f} sampled a second"),
    ("unique", "train/unique_tokens_per_s", "{0:,.0f} trained a second"),
    ("prefix hits", "rollout/prefix_hit_share", "{0:.0%}"),
    ("together", "rollout/occupancy", "{0:.0f} requests"),
    ("GPU", "gpu/utilisation", "{0:.0%} busy"),
    ("GPU memory", "gpu/memory_share", "{0:.0%} of the fullest"),
    ("power", "gpu/power_w", "{0:,.0f} W of all GPUs"),
    ("in flight", "queue/in_flight", "{0:.0f} start groups"),
    ("ready", "queue/ready", "{0:.0f} start groups"),
    ("memory", "memory/trainer_mib", "{0:,.0f} MiB of the trainer"),
)
_WIDTH, _ALERTS = 32, 4


def watch(
    *,
    run: Run = LATEST,
    runs_root: RunsRoot = Path("runs"),
    interval_s: Annotated[float, Parameter(help="Seconds between two updates.")] = 2.0,
    once: Annotated[bool, Parameter(help="Print one screen and exit.", negative="")] = False,
) -> None:
    """Watch a run: progress, curves, where its time goes, and alerts. It only reads the run's files.

    Stops when the run is done, or with Ctrl-C, which does not affect the run.

    Examples

        entente watch --run mine

        entente watch --run mine --once
    """
    from entente.reports.read_run import read_run
    from storage.runs import RunPaths

    if interval_s <= 0:
        raise InputError(f"--interval-s must be above 0, not {interval_s:g}")
    paths, console = RunPaths(runs_root / which_run(run, runs_root)), Console(highlight=False)
    progress = read_run(paths)
    if once or not console.is_terminal:
        console.print(_screen(progress))
        return
    with Live(_screen(progress), console=console, refresh_per_second=4) as live:
        while not progress.is_over:
            time.sleep(interval_s)
            progress = read_run(paths)
            live.update(_screen(progress))


def _screen(progress: "RecordedRun") -> RenderableType:
    parts: list[RenderableType] = [_head(progress)]
    if progress.steps:
        parts += [_curves(progress), Text("where the time goes", style="bold"), _time(progress)]
    parts += [Text(line, style="yellow") for line in progress.alerts[-_ALERTS:]]
    return Group(*parts)


def _head(progress: "RecordedRun") -> Text:
    done, state = max(progress.steps, default=0), "is at work" if progress.at_work else "is not at work"
    if progress.is_over:
        state = "is done"
    elif progress.quiet_s > 60:
        state += f", nothing was written for {progress.quiet_s / 60:.0f} minutes"
    words = f"{progress.name}: {done} of {progress.planned} steps; it {state}"
    seconds = [figures["time/step_s"] for figures in list(progress.steps.values())[-20:]]
    if seconds and progress.at_work and not progress.is_over:
        each = sum(seconds) / len(seconds)
        words += f"; {3600 / each:,.0f} steps an hour, {each * (progress.planned - done) / 60:,.0f} minutes to go"
    return Text(words, style="bold")


def _curves(progress: "RecordedRun") -> Table:
    table = Table(box=None, padding=(0, 1), show_header=False)
    for title, name, form in _CURVES:
        values = [figures[name] for figures in progress.steps.values() if name in figures]
        if values:
            table.add_row(title, Text(sparkline(values, _WIDTH), style="cyan"), form.format(values[-1]))
    return table


def _time(progress: "RecordedRun") -> Table:
    from entente.telemetry.stages import STAGES, stages_of

    table = Table(box=None, padding=(0, 1), show_header=False)
    last = [stages_of(figures) for figures in list(progress.steps.values())[-20:]]
    whole = sum(sum(parts.values()) for parts in last)
    for part in STAGES:
        share = sum(parts[part] for parts in last) / whole
        table.add_row(part, Text(f"{'█' * round(_WIDTH * share):<{_WIDTH}}", style="cyan"), f"{share:.0%}")
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """The curve of `values` in at most `width` characters, each the mean of a range, scaled from lowest to highest."""
    width = min(width, len(values))
    bounds = [len(values) * place // width for place in range(width + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        return _TICKS[0] * width
    return "".join(_TICKS[round((value - low) / (high - low) * (len(_TICKS) - 1))] for value in means)
