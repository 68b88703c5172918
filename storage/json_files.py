"""JSON files of a run: read without trust, and sealed where a changed digit must be noticed.

Promise: whatever lies under the name, reading it ends: a pipe, a folder, a file too large, text that is no JSON or is nested too
deeply are each a `DataError` of one sentence.
Never: know what a file says.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storage.files import open_regular
from telemetry.errors import DataError

_LARGEST = 64 * 2**20  # bytes; the files of a run are thousands of times smaller
_SEAL = "checksum"


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: there is no such file.
        DataError: it holds no JSON object.
    """
    try:
        with open_regular(path) as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} bytes")
        found = json.loads(content)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"'{path}' holds no JSON ({error}); restore it from a copy.") from error
    if not isinstance(found, dict):
        raise DataError(f"'{path}' holds no JSON object; restore it from a copy.")
    return found


def sealed(record: Mapping[str, Any]) -> str:
    """The record as JSON with a checksum over all its entries; float64 values keep every bit."""
    return json.dumps({**record, _SEAL: _checksum(record)}, indent=1)


def is_sealed(record: Mapping[str, Any]) -> bool:
    """Whether a record that was read carries the checksum of its entries."""
    return record.get(_SEAL) == _checksum({name: value for name, value in record.items() if name != _SEAL})


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
