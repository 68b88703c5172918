"""Stores the result of each arm of a long benchmark in a file, so that an interrupted benchmark can continue.

A result is valid for the commit with its uncommitted changes, the settings and the machine that it was measured with. An arm is
measured again under others, and its earlier results are kept beside the new one.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.threads import usable_cores
from telemetry.machine import cpu_model
from telemetry.progress import reporter
from telemetry.read_file import LARGEST_RESULT, read_json_object

_ROOT = Path(__file__).resolve().parent.parent
_SOURCES = ("*.py", "*.sql", "*.toml", "*.lock", ":(exclude)tests")
"""Files whose uncommitted changes count, as git's pathspecs."""


class KeptArms:
    """Results by arm and conditions, in one JSON file, or only in memory."""

    def __init__(self, file: Path | None, conditions: Mapping[str, str]) -> None:
        """Read the results in `file`.

        Args:
            file: need not exist; None: results are not stored.
            conditions: what results depend on, see `conditions_of`.

        Raises:
            InputError: the file cannot be read or holds no results.
        """
        self._file, self._conditions = file, dict(conditions)
        self._results: dict[str, Any] = {}
        if file is not None and file.exists():
            self._results = read_json_object(file, at_most=LARGEST_RESULT, what="file of kept results")

    def once(self, arm: str, measure: Callable[[], Any]) -> Any:
        """The stored result of `arm` under these conditions; one that is missing is measured and stored beside the others."""
        entries = self._entries(arm)
        for each in entries:
            if each["conditions"] == self._conditions:
                return each["result"]
        if entries:
            last = entries[-1]["conditions"]
            others = [name for name in {**last, **self._conditions} if last.get(name) != self._conditions.get(name)]
            reporter().say(f"the stored arm '{arm}' is of another {' and '.join(others)}: it is measured anew")
        result = measure()
        self._results[arm] = [*entries, {"conditions": self._conditions, "result": result}]
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            aside = self._file.with_suffix(".tmp")
            aside.write_text(json.dumps(self._results))
            os.replace(aside, self._file)
        return result

    def _entries(self, arm: str) -> list[dict[str, Any]]:
        """The stored results of `arm`, each with its conditions; anything else in their place is left out."""
        stored: Any = self._results.get(arm)
        found: list[Any] = stored if isinstance(stored, list) else []
        sound = [each for each in found if isinstance(each, dict) and isinstance(each.get("conditions"), dict)]
        return [each for each in sound if "result" in each]


def conditions_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """What the result of an arm depends on: commit, settings and machine, each as a short text.

    Args:
        settings: those of all arms, as JSON values.
    """
    return {
        "commit": _commit(_ROOT),
        "settings": _digest(json.dumps(settings, sort_keys=True).encode()),
        "machine": f"{cpu_model()}, {usable_cores()} cores",
    }


def _commit(root: Path) -> str:
    """Commit of the checkout at `root`, with a digest of the sources changed since; without one, the version of the package."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        return version("entente")
    try:
        commit, changes = _git(root, "rev-parse", "HEAD").decode().strip(), _git(root, "diff", "HEAD", "--", *_SOURCES)
        others = _git(root, "ls-files", "-z", "--others", "--exclude-standard", "--", *_SOURCES).decode().split("\0")
    except subprocess.CalledProcessError:  # there is no commit yet, or the checkout is another user's
        return version("entente")
    for name in others:
        changes += name.encode() + (root / name).read_bytes() if name else b""
    return f"{commit} with changes {_digest(changes)}" if changes else commit


def _git(root: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True).stdout


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
