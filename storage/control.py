"""The control file of a run, `control.json`, read by the processes that play its rollouts, such as those of a Dask cluster.

The training process replaces it whenever it serves a version, so readers always find a complete file. It holds `name=value`
marks of all that rows depend on: row schema version, game engine version, and source hashes of packages that shape rows,
also of users' bots. Machines with equal marks write the same rows.
"""

import hashlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType

from pydantic import BaseModel, ConfigDict, ValidationError

from entente.game.scripted import SEARCHES, is_player
from entente.records.policy_version import PolicyVersion
from entente.telemetry.errors import DataError, InputError, first_problem
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
        problem = first_problem(error)
        raise DataError(f"{paths.control} is damaged ({problem}): the run writes it again when it resumes") from error


class ControlDesk:
    """Writes the control file of a run, from any thread of the training process alone."""

    def __init__(
        self, paths: RunPaths, *, base_model: str, plays: str, max_policy_lag: int, opponents: Iterable[str] = ()
    ) -> None:
        """`opponents`: names of the run's scripted opponents."""
        self._paths, self._base_model, self._plays, self._lag = paths, base_model, plays, max_policy_lag
        self._program = program_marks(opponents)
        self._lock = threading.Lock()

    def serve(self, policy: PolicyVersion) -> None:
        control = Control(
            version=policy.version,
            adapter_hash=policy.adapter_hash,
            oldest=max(0, policy.version - self._lag),
            base_model=self._base_model,
            plays=self._plays,
            program=self._program,
        )
        with self._lock:
            durable_write(self._paths.control, control.model_dump_json(indent=1).encode())


def program_marks(opponents: Iterable[str] = ()) -> tuple[str, ...]:
    sources = {name: source_hash(name) for name in _PACKAGES} | bot_sources(opponents)
    packages = (f"package {name}={source}" for name, source in sources.items())
    return f"schema of rows={SCHEMA_VERSION}", f"package diplomacy={package_version('diplomacy')}", *packages


def program_differences(there: tuple[str, ...], opponents: Iterable[str] = ()) -> str:
    """Differences between this program and one with the marks `there`, in words; empty if there are none."""
    theirs, ours = _by_name(there), _by_name(program_marks(opponents))
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return ", ".join(f"{name} is {ours.get(name, 'unknown')} here and {theirs.get(name, 'unknown')} there" for name in names)


def _by_name(marks: tuple[str, ...]) -> dict[str, str]:
    parts = (mark.rpartition("=") for mark in marks)
    return {name: value for name, _, value in parts}


def code_of_play(players: Iterable[str] = ()) -> dict[str, str]:
    """What decides a game beside settings and models: sources of `entente.game`, `entente.players` and the users' bots among
    `players`, and the adjudicator. Names of versions such as 'other:v20' must not be in `players`."""
    sources = {name: source_hash(name) for name in ("entente.game", "entente.players")}
    return sources | bot_sources(players) | {"diplomacy": package_version("diplomacy")}


def bot_sources(players: Iterable[str]) -> dict[str, str]:
    """Top-level package of each user's bot among `players` -> hash of its source. Raises InputError if it is not installed."""
    return part_sources(name for name in players if is_player(name.removesuffix(SEARCHES)))


def part_sources(names: Iterable[str]) -> dict[str, str]:
    """Top-level package of each `module:attribute` among `names`, such as a user's reward -> hash of its source. Raises
    InputError if it is not installed."""
    packages = {name.partition(":")[0].partition(".")[0] for name in names if ":" in name}
    return {package: source_hash(package) for package in sorted(packages)}


@cache  # of the code that this process has loaded, also if a user edits it meanwhile
def source_hash(package: str) -> str:
    """Hash of all Python files of a package, or of a module's one file; 8 hex digits."""
    try:
        spec = find_spec(package)
    except ValueError:  # __main__
        spec = None
    if spec is None:
        raise InputError(f"there is no package '{package}' here: install it, or put its folder on PYTHONPATH")
    content = hashlib.sha256()
    if spec.submodule_search_locations is None and spec.origin and spec.has_location:
        content.update((_archive_of(Path(spec.origin)) or Path(spec.origin)).read_bytes())
    for folder in map(Path, spec.submodule_search_locations or ()):
        if archive := _archive_of(folder):
            content.update(archive.read_bytes())
        for file in _python_files(folder):
            content.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return content.hexdigest()[:8]


def _archive_of(path: Path) -> Path | None:
    """The zip file or wheel that a path of Python's import goes through."""
    return next((above for above in path.parents if above.is_file()), None)


def _python_files(folder: Path) -> list[Path]:
    """Sorted; also those of linked folders, each folder once, because links may form a loop."""
    files, seen = list[Path](), {os.path.realpath(folder)}
    for here, folders, names in os.walk(folder, followlinks=True):
        files += [Path(here, name) for name in names if name.endswith(".py")]
        real = {name: os.path.realpath(Path(here, name)) for name in sorted(folders)}
        folders[:] = [name for name, place in real.items() if not (place in seen or seen.add(place))]
    return sorted(files)


def check_sources(sources: Mapping[str, str]) -> None:
    """In a worker process: raises InputError if it has other files of a package than its parent, whose hashes are `sources`."""
    if other := [package for package, theirs in sources.items() if source_hash(package) != theirs]:
        raise InputError(f"{', '.join(other)} was edited since this command began: run it again")


def edited_since(sources: Mapping[str, str]) -> dict[str, str]:
    """Packages of `sources` (name -> hash) whose files differ from what this process loaded, with their hash now: a process that
    starts now, such as a trainer, loads these."""
    hashes = {package: source_hash.__wrapped__(package) for package in sources}
    return {name: now for name, now in hashes.items() if now != sources[name] or _has_former_code(name)}


def _has_former_code(package: str) -> bool:
    """Whether a function or method that this process has loaded is not in the package's files now: a notebook may import a module
    and edit it before its first `source_hash`."""
    for name, module in list(sys.modules.items()):
        get_code, file = getattr(getattr(module, "__loader__", None), "get_code", None), getattr(module, "__file__", None)
        if name.partition(".")[0] != package or get_code is None:
            continue
        try:
            now = set(_codes(get_code(module.__name__)))  # `name` may be another name of it
        except (ImportError, OSError, SyntaxError):  # removed, or in the middle of an edit
            return True
        for value in vars(module).values():
            for part in (value, *(vars(value).values() if isinstance(value, type) else ())):
                code = getattr(getattr(part, "__wrapped__", part), "__code__", None)
                if isinstance(code, CodeType) and code.co_filename == file and code not in now:
                    return True
    return False


def _codes(code: object) -> Iterator[CodeType]:
    if isinstance(code, CodeType):
        yield code
        for inner in code.co_consts:
            yield from _codes(inner)
