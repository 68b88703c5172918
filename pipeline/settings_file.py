"""Reads a TOML file of settings within bounds of size and depth. It does not check names or values."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from telemetry.errors import InputError
from telemetry.read_file import read_text

_LARGEST_FILE, _LONGEST_LINE, _DEEPEST = 1 << 17, 2000, 16
"""Largest bytes, characters per line and nesting levels of a settings file: ten times what all settings need."""


def read_settings_file(file: Path) -> dict[str, Any]:
    """The tree of values in `file`.

    Raises:
        InputError: the file cannot be read, is not TOML, or exceeds the bounds.
    """
    text = read_text(file, at_most=_LARGEST_FILE, what="settings file")
    # The parser's time and memory grow with the square of the number of parts of a key. A key cannot span lines.
    longest = max(map(len, text.splitlines()), default=0)
    if longest > _LONGEST_LINE:
        raise InputError(
            f"settings file '{file}' cannot be read: it has a line of {longest:,} characters, and at most {_LONGEST_LINE:,} are "
            "allowed: break the line"
        )
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, a number with thousands of digits, or too deep
        raise InputError(f"settings file '{file}' cannot be read: {error}") from error
    level: list[Any] = [tree]
    for _ in range(_DEEPEST):
        level = [inner for each in level for inner in _children(each)]
    if level:
        raise InputError(f"settings file '{file}' cannot be read: it nests values more than {_DEEPEST} deep")
    return tree


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()
