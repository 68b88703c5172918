"""Arms of a long benchmark, each kept in a file as it ends: a benchmark that was cut goes on with the next arm."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from telemetry.errors import InputError
from telemetry.read_file import LARGEST_RESULT, read_text


class KeptArms:
    """Results by arm, in one JSON file; without a file nothing outlives the program."""

    def __init__(self, file: Path | None) -> None:
        """`file` need not be there yet."""
        self._file = file
        self._results: dict[str, Any] = {} if file is None or not file.exists() else _read(file)

    def once(self, arm: str, measure: Callable[[], Any]) -> Any:
        """What is kept of `arm`; else what `measure` gives, which is then kept."""
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
