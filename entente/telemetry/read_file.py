"""Reads files that users or other processes name, if regular and of bounded size.

Opened without blocking, because opening a pipe may block for ever, and checked once open, so a swap of the file has no effect."""

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from entente.telemetry.errors import EntenteError, InputError

LARGEST_RESULT = 16 << 20
"""Bytes of a stored profile or benchmark result, a hundred times the usual size."""


def open_regular(file: Path) -> BufferedReader:
    """Refuse a pipe or device at once. Raises OSError if the file is missing or not regular."""
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))
    return os.fdopen(handle, "rb")


def read_regular(file: Path, *, at_most: int, what: str, error: type[EntenteError] = InputError) -> bytes:
    """Raise `error` if the file is missing, unreadable, not regular, or too large. `what`: noun, such as "settings file"."""
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            # `read` allocates the size that it is given, so limit it to the file's size; the file may grow meanwhile.
            content = b"" if size > at_most else stream.read(size + 1)
    except (OSError, ValueError) as failure:  # ValueError: a name with a zero byte
        reason = getattr(failure, "strerror", None) or str(failure)
        raise error(f"{what} '{file}' cannot be read: {reason}") from failure
    if size > at_most or len(content) > at_most:
        raise error(f"{what} '{file}' cannot be read: it has more than {at_most:,} bytes")
    return content


def read_text(file: Path, *, at_most: int, what: str) -> str:
    """As `read_regular`; raises InputError also if it is not UTF-8."""
    try:
        return read_regular(file, at_most=at_most, what=what).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{what} '{file}' cannot be read: it is not UTF-8 text") from error


def read_json_object(file: Path, *, at_most: int, what: str) -> dict[str, Any]:
    """As `read_text`; raises InputError also if it is not a JSON object."""
    try:
        content = json.loads(read_text(file, at_most=at_most, what=what))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} '{file}' is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{what} '{file}' holds no JSON object")
    return content
