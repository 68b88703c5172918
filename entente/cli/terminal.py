"""Text and tables for a terminal, or for a file or pipe in its place."""

from rich.console import Console
from rich.text import Text

from entente.telemetry.plain_text import shown


def cell(text: str, *, keep: str = "") -> Text:
    """Text that is safe to show, as a cell of a table, without markup."""
    return Text(shown(text, keep=keep))


def output_console(columns: int = 160) -> Console:
    """A console on standard output: as wide as the terminal, or `columns` wide where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=columns, highlight=False)
