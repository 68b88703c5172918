"""A file of lines that grows no further than a bound: what came before is kept once beside it, and then goes."""

import os
from pathlib import Path

LARGEST_FILE = 32 << 20
"""Bytes after which a file begins anew."""


def append_line(file: Path, line: str, largest: int = LARGEST_FILE) -> None:
    """Append `line`; a file that has passed `largest` bytes becomes `<name>.before<ending>` first."""
    if file.exists() and file.stat().st_size > largest:
        os.replace(file, file.with_suffix(f".before{file.suffix}"))
    with file.open("a", encoding="utf-8") as out:
        out.write(line + "\n")
