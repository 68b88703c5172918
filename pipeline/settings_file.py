"""A TOML file of settings as a tree of values, read within bounds; which settings there are is not known here."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from telemetry.errors import InputError
from telemetry.read_file import read_text

_LARGEST_FILE, _LONGEST_LINE, _DEEPEST = 1 << 17, 2000, 16
"""Bytes, characters of a line, and levels of nested values of a settings file: ten times what all settings take."""


def read_settings_file(file: Path) -> dict[str, Any]:
    """The tree of values in `file`.

    Raises:
        InputError: it cannot be read, is no TOML, or is larger or deeper than any settings are.
    """
    text = read_text(file, at_most=_LARGEST_FILE, what="settings file")
    # The parser's time and memory grow with the square of the parts of a key, and a key ends with its line.
    longest = max(map(len, text.splitlines()), default=0)
    if longest > _LONGEST_LINE:
        raise InputError(
            f"settings file '{file}' cannot be read: it has a line of {longest:,} characters, and at most {_LONGEST_LINE:,} are "
            "allowed: break the line"
        )
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, a number of thousands of digits, too deep
        raise InputError(f"settings file '{file}' cannot be read: {error}") from error
    level: list[Any] = [tree]
    for _ in range(_DEEPEST):
        level = [inner for each in level for inner in _inside(each)]
    if level:
        raise InputError(f"settings file '{file}' cannot be read: it nests values more than {_DEEPEST} deep")
    return tree


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
