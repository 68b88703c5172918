"""Tombstones: which shards are given up, and the facts of their rows, which stay.

Promise: ``retired/snap-000001.parquet`` is published whole before anything that it names is removed, in the layout of an index
snapshot: whoever meets a missing shard finds its name here, and every question about decisions, groups, batches and plies has the
answer that it had before. What it names is removed only if it is still the file that was meant, and only after a while, since a
reader on a network file system may have it mapped.
Never: decide what goes.
"""

import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from storage.files import FILES
from storage.follow import NumberedFiles
from storage.runs import RunPaths
from storage.snapshots import CoveredShard, IndexSnapshot, file_marks, read_snapshot, snapshot_files, write_snapshot
from telemetry.errors import DataError

TOMBSTONE_NAME = re.compile(r"snap-(\d{6,})\.parquet")


class Tombstones:
    """The tombstones of one run, each said once."""

    def __init__(self, paths: RunPaths) -> None:
        self._files = NumberedFiles(paths.retired, TOMBSTONE_NAME, "snap-{:06d}.parquet".format)

    def arrivals(self) -> tuple[list[IndexSnapshot], list[tuple[Path, str]]]:
        """Those not said before, oldest first; and damaged ones, each with a sentence."""
        found, damaged = [], []
        for _, path in self._files.arrivals():
            try:
                found.append(read_snapshot(path))
            except DataError as error:
                damaged.append((path, str(error)))
        return found, damaged


def publish_tombstone(paths: RunPaths, given_up: IndexSnapshot) -> Path:
    """Say for good that these shards are given up."""
    while (written := write_snapshot(paths.retired, given_up)) is None:
        continue  # another process took the number
    return written


def due(paths: RunPaths, grace_s: float, now: float | None = None) -> list[Path]:
    """Files of shards that tombstones older than ``grace_s`` name and that are still there, decisions before their plies."""
    now = time.time() if now is None else now
    files: list[Path] = []
    for _, tombstone in snapshot_files(paths.retired):
        try:
            if now - tombstone.stat().st_mtime >= grace_s:
                files += files_of(paths, read_snapshot(tombstone).shards)
        except DataError:
            continue  # it does not say what it names, so that stays
    return files


def files_of(paths: RunPaths, shards: Iterable[CoveredShard]) -> list[Path]:
    """Files of the shards that are still those that were meant, and of their plies."""
    plies: dict[str, dict[str, list[str]]] = {}
    found = []
    for shard in shards:
        if shard.producer not in plies:
            plies[shard.producer] = _plies(paths.shards / shard.producer)
        path = paths.shards / shard.name
        if shard.still_there(str(paths.shards)):
            found.append(path)
        elif file_marks(path) is not None:
            continue  # another file under its name, with plies of its own
        found += [path.with_name(name) for name in plies[shard.producer].get(path.stem, ())]
    return found


def bury(paths: RunPaths, grace_s: float) -> int:
    """Remove what is due; bytes that were freed. Killed at any moment, the next call goes on."""
    freed = 0
    for path in due(paths, grace_s):
        freed += (file_marks(path) or (0, 0))[0]
        FILES.remove(path)
    return freed


def _plies(folder: Path) -> dict[str, list[str]]:
    """Names of plies files by the name of their shard."""
    found: dict[str, list[str]] = {}
    for name in FILES.names(folder):
        if name.endswith(".plies.arrow"):
            found.setdefault(name.partition(".")[0], []).append(name)
    return found


def bytes_of(files: Iterable[Path]) -> int:
    """Bytes on disk of those that are there."""
    return sum((file_marks(path) or (0, 0))[0] for path in files)


def shard_bytes(paths: RunPaths) -> int:
    """Bytes of all that lies in ``shards/``."""
    return sum(
        entry.stat().st_size
        for producer in FILES.folders(paths.shards)
        for entry in os.scandir(paths.shards / producer)
        if entry.is_file(follow_symlinks=False)
    )
