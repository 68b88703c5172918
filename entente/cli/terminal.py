"""Text and tables for a terminal, or for a file or pipe in its place."""

import json as jsonlib
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from entente.telemetry.progress import shown

_COLUMNS = 100
"""Width of a plan's table where there is no terminal."""


def cell(text: str, *, keep: str = "") -> Text:
    """Text that is safe to show, as a cell of a table, without markup."""
    return Text(shown(text, keep=keep))


def output_console(columns: int = 160) -> Console:
    """A console on standard output: as wide as the terminal, or `columns` wide where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=columns, highlight=False)


def show_plan(plan: dict[str, Any], *, json: bool) -> None:
    """Print what `--dry-run` shows: the plan as a table for people, or as one JSON object."""
    if json:
        print(jsonlib.dumps(plan))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(f"entente {plan['command']}", no_wrap=True)
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
