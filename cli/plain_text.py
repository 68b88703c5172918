"""Text from files and rows as a terminal may show it: nothing in it moves the cursor, changes colours or reads as markup."""

from rich.text import Text


def shown(text: str, *, keep: str = "") -> str:
    """The text with every character that does not print as its escape, such as \\\\x1b; those in `keep` stay."""
    return "".join(letter if letter.isprintable() or letter in keep else _escape(letter) for letter in text)


def cell(text: str, *, keep: str = "") -> Text:
    """The same as a cell of a table."""
    return Text(shown(text, keep=keep))


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape").decode()
