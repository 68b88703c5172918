"""A setting that holds a query: its text, or a file that ends in .sql, whose text is kept."""

from pathlib import Path
from typing import Any

from telemetry.read_file import read_text

_LONGEST_QUERY = 16_384
"""Largest size of the file in bytes. Settings and each ledger hold its text."""


def query_text(given: Any) -> Any:
    """The text of the file that `given` names; `given` itself if it names none.

    Raises:
        InputError: the file cannot be read, or is too long.
    """
    if isinstance(given, str) and given.endswith(".sql") and "\n" not in given:
        return read_text(Path(given), at_most=_LONGEST_QUERY, what="query").strip() + "\n"  # so it is never the name of a file
    return given
