"""Reads recorded games as JSON values: one per line, pretty-printed, or in one list.

Read in pieces, so an archive may exceed memory. After invalid JSON, reading continues at the next line that starts with a brace.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any

from entente.telemetry.errors import InputError
from entente.telemetry.read_file import open_regular

_PIECE = 1 << 20
_LONGEST = 1 << 26
"""Characters of the longest game; a hundred years without press are about a million."""
_LONGEST_WORD = 16
"""Characters before the end of a text in which a truncated word may start."""
_BETWEEN = ",] \t\r\n"
_COMPRESSED = (b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
"""Magic bytes of gzip, zip, bzip2, xz and zstandard."""


def content_hash(files: Sequence[Path]) -> tuple[str, int]:
    """(hash over all files, their bytes); raises InputError if one cannot be read."""
    digest, size = sha256(), 0
    for number, file in enumerate(files):
        if number:  # one file of two lists has not the games of two files
            digest.update(f"\0{size}".encode())
        with _open(file) as stream:
            while piece := stream.read(_PIECE):
                digest.update(piece)
                size += len(piece)
    return digest.hexdigest(), size


def read_values(files: Sequence[Path], on_bytes: Callable[[int], None]) -> Iterator[tuple[str, Any]]:
    """(place, value), a `ValueError` for invalid JSON. `on_bytes`: gets the bytes read so far, over all files. Raises InputError
    if a file is unreadable or compressed."""
    before = 0
    for file in files:
        with _open(file) as stream:
            # Press may hold bytes of any encoding, and is not used here.
            text = TextIOWrapper(stream, encoding=json.detect_encoding(stream.peek(4)[:4]), errors="replace")
            for line, value in _values(text):
                yield f"the game in line {line} of '{file}'", value
                on_bytes(before + stream.tell())
            before += os.fstat(stream.fileno()).st_size


def _open(file: Path) -> BufferedReader:
    try:
        stream = open_regular(file)
    except OSError as error:
        raise InputError(f"the recorded games '{file}' cannot be read: {error.strerror}") from error
    if stream.peek(6).startswith(_COMPRESSED):
        stream.close()
        raise InputError(f"the recorded games '{file}' are compressed: unpack the file first")
    return stream


def _values(stream: TextIOWrapper) -> Iterator[tuple[int, Any]]:
    """(line, value). Unpacks a list around all of them."""
    decoder, line = json.JSONDecoder(), 1
    text = stream.read(_PIECE)
    if text.lstrip().startswith("["):
        text = text.replace("[", " ", 1)
    while text:
        gap = len(text) - len(text.lstrip(_BETWEEN))
        line, text = line + text.count("\n", 0, gap), text[gap:] or stream.read(_PIECE)
        if not text or text[0] in _BETWEEN:
            continue
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as error:
            if _is_cut(error, text) and len(text) < _LONGEST and (more := stream.read(max(_PIECE, len(text)))):
                text += more
                continue
            yield line, ValueError(_what_is_wrong(error, line, text))
            line, text = _next_line(stream, line, text)
        else:
            yield line, value
            line, text = line + text.count("\n", 0, end), text[end:] or stream.read(_PIECE)


def _is_cut(error: Exception, text: str) -> bool:
    """Whether the text ends within the value."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos > len(text) - _LONGEST_WORD


def _what_is_wrong(error: Exception, line: int, text: str) -> str:
    if len(text) >= _LONGEST:
        return f"it is longer than {_LONGEST:,} characters"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} in line {line + error.lineno - 1}, column {error.colno}"
    return "its brackets are nested too deeply"


def _next_line(stream: TextIOWrapper, line: int, text: str) -> tuple[int, str]:
    """(number, text) of the next line that starts with a brace; no text at the end of the file."""
    while (at := text.find("\n{")) < 0:
        end = len(text) - text.endswith("\n")
        if not (more := stream.read(_PIECE)):
            return line, ""
        line, text = line + text.count("\n", 0, end), text[end:] + more
    return line + text.count("\n", 0, at + 1), text[at + 1 :]
