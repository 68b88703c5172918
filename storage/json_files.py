"""JSON files: reading with checks, writing, and checksums. Reading a pipe, a folder, a file too large, or text that is not
JSON or is nested too deeply raises DataError."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entente.telemetry.errors import DataError
from entente.telemetry.read_file import open_regular
from storage.files import durable_write, make_directory

_MAX_BYTES = 64 * 2**20  # a run's files are thousands of times smaller
_SEAL = "checksum"


def read_object(path: Path) -> dict[str, Any]:
    """Raises FileNotFoundError if the file does not exist, and DataError if it holds no JSON object."""
    try:
        with open_regular(path) as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        record = json.loads(content)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"'{path}' holds no JSON ({error}); restore it from a copy.") from error
    if not isinstance(record, dict):
        raise DataError(f"'{path}' holds no JSON object; restore it from a copy.")
    return record


def kept_object(path: Path) -> dict[str, Any]:
    """The object that marks finished work; empty if the file is missing or damaged, so that the work is done again."""
    try:
        return read_object(path)
    except (FileNotFoundError, DataError):
        return {}


def write_json(path: Path, content: object) -> None:
    """Replace a small file; after a crash it is complete or absent. Creates a missing folder."""
    make_directory(path.parent)
    durable_write(path, json.dumps(content, indent=1).encode())


def sealed(record: Mapping[str, Any]) -> str:
    """The record as JSON with a checksum over all its entries; float64 values are exact."""
    return json.dumps({**record, _SEAL: _checksum(record)}, indent=1)


def is_sealed(record: Mapping[str, Any]) -> bool:
    return record.get(_SEAL) == _checksum({name: value for name, value in record.items() if name != _SEAL})


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
