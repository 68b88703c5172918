"""Output of commands: tables and plans on standard output, progress on standard error; to a terminal, a file or a pipe."""

import json as jsonlib
import math
import os
import sys
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from entente.telemetry.progress import Reporter, install, shown

_COLUMNS = 100
_LINE_EVERY_S = 60.0


_json_output: TextIO | None = None
"""Standard output, while `json_alone` redirects all else."""


@contextmanager
def json_alone() -> Iterator[None]:
    """Within the block only `print_json` writes to standard output; all other output goes to standard error."""
    global _json_output
    if (output := sys.stdout) is None:  # the caller closed it
        yield
        return
    with ExitStack() as stack:
        if _descriptor(output) == 1:  # also what child processes and libraries in C write
            output.flush()
            output = os.fdopen(os.dup(1), "w", encoding="utf-8")
            stack.callback(output.close)
            stack.callback(os.dup2, output.fileno(), 1)
            os.dup2(2, 1)
        stack.enter_context(redirect_stdout(sys.stderr))
        _json_output = output
        try:
            yield
        finally:
            _json_output = None


def _descriptor(output: TextIO) -> int:
    try:
        return output.fileno()
    except (OSError, ValueError):  # a stand-in, in a notebook or a test
        return -1


def print_json(value: object) -> None:
    """Print a line of JSON on standard output; NaN and infinity become null."""
    print(jsonlib.dumps(_finite(value), allow_nan=False), file=_json_output, flush=True)


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cell(text: str, *, keep: str = "") -> Text:
    """A table cell without markup and control characters; folded, never cut, because it may be a name to copy."""
    return Text(shown(text, keep=keep), overflow="fold")


def output_console(columns: int = 160) -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=columns, highlight=False)


def show_page(file: Path, *, open: bool) -> None:
    print(file)
    if open:
        webbrowser.open(file.resolve().as_uri())


def show_plan(plan: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(plan)
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(f"entente {plan['command']}")
    table.add_column(overflow="fold")
    for section, rows in plan.items():
        if section != "command":
            for number, (name, value) in enumerate(_lines(rows)):
                table.add_row(section.replace("_", " ") if number == 0 else "", name, cell(value), style=_style(name))
    output_console(_COLUMNS).print(table)
    print("nothing was started, nothing was written")


def _lines(rows: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from entente.inference.memory_plan import size_text

    for name, value in rows.items():
        words = name.replace("_", " ")
        if isinstance(value, int) and "bytes" in name:
            yield words.replace(" bytes", "").replace("bytes ", ""), size_text(value)
        else:
            yield words, f"{value:,}" if isinstance(value, int) and name != "seed" else str(value)


def _style(name: str) -> str | None:
    return "yellow" if name == "warning" else None


def line_reporter(clock: Callable[[], float] = time.monotonic) -> Reporter:
    """Plain lines on standard error: one per step and per finished stage, and one a minute while a stage goes on."""

    def write(line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    return Reporter(write, every_s=_LINE_EVERY_S, rollouts=False, clock=clock)


class BarReporter(Reporter):
    def __init__(self, bars: Progress) -> None:
        super().__init__(partial(bars.console.print, highlight=False, markup=False))
        self._bars = bars
        self._stages: dict[str, TaskID] = {}

    def stage(self, name: str, done: int, total: int) -> None:
        if done >= total:
            if name in self._stages:
                self._bars.remove_task(self._stages.pop(name))
        elif name in self._stages:
            self._bars.update(self._stages[name], completed=done, total=total)
        else:
            self._stages[name] = self._bars.add_task(name, completed=done, total=total)


@contextmanager
def show_progress() -> Iterator[None]:
    console = Console(stderr=True)
    try:
        if not console.is_terminal:
            install(line_reporter())
            yield
            return
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, refresh_per_second=8) as bars:
            install(BarReporter(bars))
            yield
    finally:
        install(Reporter())
