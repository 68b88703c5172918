"""Which program plays: marks of everything that rows depend on, for processes that play for one run.

Two machines with equal marks write rows under the same rules and in the same form. A mark is `name=value`: the version of the
rows' schema, of the game engine, and for each room that shapes rows a hash of its source.
"""

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from storage.schema import SCHEMA_VERSION
from telemetry.machine import package_version

_ROOMS = ("decoding", "game", "inference", "records", "rollouts", "state_cache")
"""Rooms whose code decides what is asked, drawn, played and written."""


@cache
def program_marks() -> tuple[str, ...]:
    """The marks of this process's program, in a fixed order."""
    sources = (f"room {room}={_source_hash(room)}" for room in _ROOMS)
    return f"schema of rows={SCHEMA_VERSION}", f"package diplomacy={package_version('diplomacy')}", *sources


def program_differences(there: tuple[str, ...]) -> str:
    """What differs between this program and one with the marks `there`, in words; empty if nothing does."""
    theirs, ours = _by_name(there), _by_name(program_marks())
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return ", ".join(f"{name} is {ours.get(name, 'unknown')} here and {theirs.get(name, 'unknown')} there" for name in names)


def _by_name(marks: tuple[str, ...]) -> dict[str, str]:
    parts = (mark.rpartition("=") for mark in marks)
    return {name: value for name, _, value in parts}


def _source_hash(room: str) -> str:
    found = find_spec(room)
    assert found is not None and found.submodule_search_locations, f"{room} is a package of this program"
    folder, content = Path(next(iter(found.submodule_search_locations))), hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return content.hexdigest()[:8]
