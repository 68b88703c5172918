"""Text and tables for a terminal, or for a file or pipe in its place."""

from rich.console import Console
from rich.text import Text


def shown(text: str, *, keep: str = "") -> str:
    """The text with every character that does not print as its escape, such as \\\\x1b; those in `keep` stay.

    So text from files and rows cannot move the cursor or change colours.
    """
    return "".join(letter if letter.isprintable() or letter in keep else _escape(letter) for letter in text)


def cell(text: str, *, keep: str = "") -> Text:
    """The same as a cell of a table, without markup."""
    return Text(shown(text, keep=keep))


def output_console(columns: int = 160) -> Console:
    """A console on standard output: as wide as the terminal, or `columns` wide where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=columns, highlight=False)


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode()
