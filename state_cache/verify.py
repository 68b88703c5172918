"""Checks a published state cache to the last position: files against manifest, and every position played from its text.

Promises: what passes is byte for byte what was published, restores to the very position that it names, and keeps training
and held-out positions apart by game and by board. Changes nothing.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from game.board import Board
from game.snapshot import Snapshot, board_key
from state_cache.store import MANIFEST, PARTS, StateCache, open_cache
from state_cache.strata import count_strata
from telemetry.errors import DataError, InputError


def versions(root: Path) -> list[Path]:
    """Folders of state caches under `root`, damaged ones too, by name."""
    return sorted(path for path in root.glob("v-*") if path.is_dir())


def verify(path: Path) -> StateCache:
    """Read the cache at `path` and check every position of it.

    Raises:
        DataError: something is not as it was published; says which file or position.
    """
    try:
        cache = open_cache(path)
    except InputError as error:
        raise DataError(str(error)) from error
    for part, snapshots in zip(PARTS, (cache.train, cache.held_out), strict=True):
        for snapshot in snapshots:
            _restores(snapshot, path / f"{part}.arrow")
    _strata_hold(cache)
    for what, key in (("game", lambda snapshot: snapshot.game_id), ("board", board_key)):
        shared = {key(snapshot) for snapshot in cache.train} & {key(snapshot) for snapshot in cache.held_out}
        if shared:
            raise DataError(f"{path} has {what} {min(shared)} among its training and its held-out positions: {_CURE}.")
    return cache


_CURE = "delete the folder and build the state cache again"


def _restores(snapshot: Snapshot, file: Path) -> None:
    """The position, frozen again after it was restored, is the same one, and the columns beside it tell the truth."""
    try:
        again = Board.restore(snapshot).snapshot(game_id=snapshot.game_id, seed=snapshot.seed, source=snapshot.source)
    except (DataError, InputError) as error:
        raise DataError(f"{file}: {error}") from error
    if again != snapshot:
        raise DataError(f"{file} holds position {snapshot.snapshot_id} ({snapshot.phase}), which restores to another: {_CURE}.")


def _strata_hold(cache: StateCache) -> None:
    """The counts in the manifest are those of the positions; a cache from before they were kept has none."""
    told = json.loads((cache.path / MANIFEST).read_bytes()).get("strata")
    counted = {part: _named(snapshots) for part, snapshots in zip(PARTS, (cache.train, cache.held_out), strict=True)}
    if told is not None and told != counted:
        raise DataError(f"{cache.path / MANIFEST} counts other strata than its files hold: {_CURE}.")


def _named(snapshots: Iterable[Snapshot]) -> dict[str, int]:
    return {str(stratum): count for stratum, count in count_strata(snapshots).items()}
