"""Who plays a match: names to scripted players and to policy versions of runs, checked before anything starts.

A version is named 'base', 'newest' or 'v20'; of another run 'other:v20'. What comes back bears its number, so what was played as
'newest' is the same player tomorrow.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from game.players import check_player, player_names
from inference.engine import BASE_HASH, BASE_VERSION
from storage.adapters import Adapter, published_versions, read_adapter
from storage.runs import RunPaths, check_name
from telemetry.errors import InputError

_VERSION = re.compile(r"(?:(?P<run>[^:]+):)?(?P<version>base|newest|v\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One player of a match."""

    name: str
    """As it stands in tables: 'mover', 'v20', or 'other:v20'."""
    run: str = ""
    """Run whose version it is; empty for a scripted player."""
    version: int = BASE_VERSION
    adapter_hash: str = ""
    """Hash of its adapter, 'base' for the base model; empty for a scripted player."""
    adapter: Path | None = None
    """Its folder; None for the base model and for scripted players."""

    @property
    def is_policy(self) -> bool:
        """Whether a language model plays it."""
        return bool(self.run)


def contestants(names: Sequence[str], run: str, runs_root: Path) -> list[Contestant]:
    """The players of these names, seen from `run`.

    Raises:
        InputError: a name means nobody, a version is not there, or a player is named twice.
    """
    found = [contestant(name, run, runs_root) for name in names]
    for place, each in enumerate(found):
        if each.name in [earlier.name for earlier in found[:place]]:
            raise InputError(f"player '{each.name}' is named twice (as '{names[place]}'): name each once")
    return found


def contestant(name: str, run: str, runs_root: Path) -> Contestant:
    """The player of this name.

    Raises:
        InputError: there is none.
    """
    if name in player_names() and not _VERSION.fullmatch(name):
        check_player(name)
        return Contestant(name=name)
    match = _VERSION.fullmatch(name)
    if match is None:
        raise InputError(
            f"there is no player '{name}': name a version ('base', 'newest', 'v20', 'other:v20') or a scripted player, one of "
            f"{', '.join(player_names())}"
        )
    owner = match["run"] or run
    paths = RunPaths(runs_root / check_name(owner, "run"))
    if not paths.settings.is_file():
        raise InputError(f"there is no run '{owner}' in '{runs_root}', so '{name}' cannot play")
    version = known_version(paths, owner, match["version"])
    label = f"v{version}" if owner == run else f"{owner}:v{version}"
    if version == BASE_VERSION:
        return Contestant(name=label, run=owner, adapter_hash=BASE_HASH)
    adapter: Adapter = read_adapter(paths, version)
    return Contestant(name=label, run=owner, version=version, adapter_hash=adapter.adapter_hash, adapter=adapter.path)


def known_version(paths: RunPaths, run: str, wanted: str | int) -> int:
    """The number of a version ('base', 'newest', 'v20', a number, -1 for the newest) that the run has.

    Raises:
        InputError: it has not.
    """
    versions = [BASE_VERSION, *published_versions(paths)]
    if wanted in ("newest", -1):
        return versions[-1]
    number = BASE_VERSION if wanted == "base" else int(str(wanted).removeprefix("v"))
    if number not in versions:
        raise InputError(f"run '{run}' has no policy version {number}; its newest is {versions[-1]}")
    return number
