"""The control file of a run, `control.json`, read by the processes that play its rollouts, such as those of a Dask cluster.

The training process replaces it whenever it serves a version, so readers always find a complete file. It holds `name=value`
marks of all that rows depend on: row schema version, game engine version, and source hashes of packages that shape rows.
Machines with equal marks write the same rows.
"""

import hashlib
import threading
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from entente.records.policy_version import PolicyVersion
from entente.telemetry.errors import DataError
from entente.telemetry.machine import package_version
from storage.arrow_files import SCHEMA_VERSION
from storage.files import durable_write
from storage.runs import RunPaths

_PACKAGES = ("entente", "state_cache")
"""Packages whose code decides which rows are sampled, played and written."""


class Control(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: int
    adapter_hash: str
    oldest: int
    """Oldest version that may still be trained on and played."""
    base_model: str
    """Identity of the model that the run trains, as `base_identity` gives it."""
    plays: str
    """Hash of the settings on which rows depend."""
    program: tuple[str, ...]
    """Marks of the training program; only a program with equal marks may play for it."""

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(version=self.version, adapter_hash=self.adapter_hash)


def read_control(paths: RunPaths) -> Control:
    try:
        content = paths.control.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{paths.control} is missing: the run has not started; start or resume its training") from error
    try:
        return Control.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        what = ": ".join(str(part) for part in (*first["loc"], first["msg"]))
        raise DataError(f"{paths.control} is damaged ({what}): the run writes it again when it resumes") from error


class ControlDesk:
    """Writes the control file of a run, from any thread of the training process alone."""

    def __init__(self, paths: RunPaths, *, base_model: str, plays: str, max_policy_lag: int) -> None:
        self._paths, self._base_model, self._plays, self._lag = paths, base_model, plays, max_policy_lag
        self._lock = threading.Lock()

    def serve(self, policy: PolicyVersion) -> None:
        control = Control(
            version=policy.version,
            adapter_hash=policy.adapter_hash,
            oldest=max(0, policy.version - self._lag),
            base_model=self._base_model,
            plays=self._plays,
            program=program_marks(),
        )
        with self._lock:
            durable_write(self._paths.control, control.model_dump_json(indent=1).encode())


@cache
def program_marks() -> tuple[str, ...]:
    sources = (f"package {name}={source_hash(name)}" for name in _PACKAGES)
    return f"schema of rows={SCHEMA_VERSION}", f"package diplomacy={package_version('diplomacy')}", *sources


def program_differences(there: tuple[str, ...]) -> str:
    """Differences between this program and one with the marks `there`, in words; empty if there are none."""
    theirs, ours = _by_name(there), _by_name(program_marks())
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return ", ".join(f"{name} is {ours.get(name, 'unknown')} here and {theirs.get(name, 'unknown')} there" for name in names)


def _by_name(marks: tuple[str, ...]) -> dict[str, str]:
    parts = (mark.rpartition("=") for mark in marks)
    return {name: value for name, _, value in parts}


@cache
def code_of_play() -> dict[str, str]:
    """What decides a game beside settings and models: sources of `entente.game` and `entente.players`, and the adjudicator."""
    sources = {name: source_hash(name) for name in ("entente.game", "entente.players")}
    return sources | {"diplomacy": package_version("diplomacy")}


def source_hash(package: str) -> str:
    """Hash of all Python files of a package, 8 hex digits."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is a package of this program"
    folder, content = Path(next(iter(spec.submodule_search_locations))), hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return content.hexdigest()[:8]
