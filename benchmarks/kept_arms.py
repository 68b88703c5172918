"""Stores the result of each arm of a long benchmark in a file, so that an interrupted benchmark can continue."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from telemetry.errors import InputError
from telemetry.read_file import LARGEST_RESULT, read_text


class KeptArms:
    """Results by arm, in one JSON file, or only in memory."""

    def __init__(self, file: Path | None) -> None:
        """`file`: read if it exists; None: results are not stored."""
        self._file = file
        self._results: dict[str, Any] = {} if file is None or not file.exists() else _read(file)

    def once(self, arm: str, measure: Callable[[], Any]) -> Any:
        """The stored result of `arm`; a missing one is measured and stored."""
        if arm not in self._results:
            self._results[arm] = measure()
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                aside = self._file.with_suffix(".tmp")
                aside.write_text(json.dumps(self._results))
                os.replace(aside, self._file)
        return self._results[arm]


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(file, at_most=LARGEST_RESULT, what="file of kept results"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"file of kept results '{file}' is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"file of kept results '{file}' holds no JSON object")
    return found
