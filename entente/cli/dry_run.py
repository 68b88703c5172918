"""What `--dry-run` shows: the plan as a table for people, or as one JSON object."""

import json as jsonlib
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from entente.cli.terminal import cell, output_console
from entente.inference.memory_plan import size_text

_COLUMNS = 100
"""Width of the table where there is no terminal."""


def show_plan(plan: dict[str, Any], *, json: bool) -> None:
    """Print `plan`."""
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
    for name, value in rows.items():
        words = name.replace("_", " ")
        if isinstance(value, int) and "bytes" in name:
            yield words.replace(" bytes", "").replace("bytes ", ""), size_text(value)
        else:
            yield words, f"{value:,}" if isinstance(value, int) and name != "seed" else str(value)


def _style(name: str) -> str | None:
    return "yellow" if name == "warning" else None
