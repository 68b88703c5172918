"""Verifies a published state cache: files match the manifest, every position restores to itself, and training and held-out
positions share no game and no board. Changes nothing."""

from dataclasses import replace
from pathlib import Path

from entente.game.board import Board
from entente.game.snapshot import Snapshot, board_key
from entente.telemetry.errors import DataError, InputError
from state_cache.store import FILES, StateCache, open_cache


def list_caches(root: Path) -> list[Path]:
    """Folders of state caches under `root`, including damaged ones, by name."""
    return sorted(path for path in root.glob("v-*") if path.is_dir())


def verify(path: Path) -> StateCache:
    """Read the cache at `path` and check every position; a DataError names the file or position that differs."""
    try:
        cache = open_cache(path)
    except InputError as error:
        raise DataError(str(error)) from error
    for name, snapshots in zip(FILES, (cache.train, cache.held_out), strict=True):
        for snapshot in snapshots:
            _check_restores(snapshot, path / name)
    for what, key in (("game", lambda snapshot: snapshot.game_id), ("board", board_key)):
        shared = {key(snapshot) for snapshot in cache.train} & {key(snapshot) for snapshot in cache.held_out}
        if shared:
            raise DataError(f"{path} has {what} {min(shared)} in both its training and its held-out positions: {_CURE}.")
    return cache


_CURE = "delete the folder and build the state cache again"


def _check_restores(snapshot: Snapshot, file: Path) -> None:
    try:
        again = Board.restore(snapshot).snapshot(game_id=snapshot.game_id, seed=snapshot.seed, source=snapshot.source)
    except (DataError, InputError) as error:
        raise DataError(f"{file}: {error}") from error
    if replace(again, power=snapshot.power) != snapshot:
        raise DataError(
            f"{file} has position {snapshot.snapshot_id} ({snapshot.phase}), which restores to another position: {_CURE}."
        )
