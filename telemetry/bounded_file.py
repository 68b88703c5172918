"""A file of lines with a size bound. Older lines are kept in one second file, which is replaced each time."""

import os
from pathlib import Path

LARGEST_FILE = 32 << 20
"""Bytes after which a new file begins."""


def append_line(file: Path, line: str, largest: int = LARGEST_FILE) -> None:
    """Append `line`; a file that has passed `largest` bytes becomes `<name>.before<ending>` first."""
    if file.exists() and file.stat().st_size > largest:
        os.replace(file, file.with_suffix(f".before{file.suffix}"))
    with file.open("a", encoding="utf-8") as out:
        out.write(line + "\n")
