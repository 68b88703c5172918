"""Players of a match: names are resolved to scripted players and policy versions before anything starts.

A version is called 'base', 'newest' or 'v20'; a version of another run 'other:v20'. A resolved player has the version's number
in its name, so a match with 'newest' can be repeated with the same version later.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from game.players import check_player, player_names
from records.policy_version import BASE, BASE_VERSION, PolicyVersion
from storage.adapters import published_versions, read_adapter
from storage.runs import RunPaths, check_name
from telemetry.errors import InputError

_VERSION = re.compile(r"(?:(?P<run>[^:]+):)?(?P<version>base|newest|v\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One player of a match."""

    name: str
    """Name in tables: 'mover', 'v20', or 'other:v20'."""
    run: str = ""
    """The run of the version; empty for a scripted player."""
    version: int = BASE_VERSION
    adapter_hash: str = ""
    """Hash of the adapter, 'base' for the base model; empty for a scripted player."""
    adapter: Path | None = None
    """Folder of the adapter; None for the base model and for scripted players."""

    @property
    def policy(self) -> PolicyVersion:
        """The version that it is. Its parts are fields of their own because match files hold them so."""
        return PolicyVersion(version=self.version, adapter_hash=self.adapter_hash, adapter=self.adapter)

    @property
    def is_policy(self) -> bool:
        """True if a language model plays it."""
        return bool(self.run)


def resolve_contestants(names: Sequence[str], run: str, runs_root: Path) -> list[Contestant]:
    """The players with these names; a version without a run name belongs to `run`.

    Raises:
        InputError: a name is unknown, a version does not exist, or a player is named twice.
    """
    found = [resolve_contestant(name, run, runs_root) for name in names]
    for index, player in enumerate(found):
        if player.name in [earlier.name for earlier in found[:index]]:
            raise InputError(f"player '{player.name}' is named twice (as '{names[index]}'): name each player once")
    return found


def resolve_contestant(name: str, run: str, runs_root: Path) -> Contestant:
    """The player with this name; see `resolve_contestants`.

    Raises:
        InputError: the name is unknown, or the version does not exist.
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
    version = resolve_version(paths, owner, match["version"])
    label = f"v{version}" if owner == run else f"{owner}:v{version}"
    policy = BASE if version == BASE_VERSION else read_adapter(paths, version)
    return Contestant(name=label, run=owner, version=policy.version, adapter_hash=policy.adapter_hash, adapter=policy.adapter)


def resolve_version(paths: RunPaths, run: str, wanted: str | int) -> int:
    """The number of a version of the run: 'base', 'newest', 'v20', a number, or -1 for the newest.

    Raises:
        InputError: the run does not have it.
    """
    versions = [BASE_VERSION, *published_versions(paths)]
    if wanted in ("newest", -1):
        return versions[-1]
    number = BASE_VERSION if wanted == "base" else int(str(wanted).removeprefix("v"))
    if number not in versions:
        raise InputError(f"run '{run}' has no policy version {number}; its newest is {versions[-1]}")
    return number
