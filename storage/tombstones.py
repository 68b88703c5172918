"""Tombstones: which shards are retired, and the facts of their rows.

`retired/snap-000001.parquet` has the layout of an index snapshot. It is published before any file that it names is removed. So
a reader that misses a shard finds its name here, and queries about decisions, groups, batches and plies give the same results
as before. A file is removed only if size and write time are unchanged, and only after a grace period, because a reader on a
network file system may have it mapped.
"""

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
    """The tombstones of one run, each returned once."""

    def __init__(self, paths: RunPaths) -> None:
        self._files = NumberedFiles(paths.retired, TOMBSTONE_NAME, "snap-{:06d}.parquet".format)

    def read_new(self) -> tuple[list[IndexSnapshot], list[tuple[Path, str]]]:
        """New tombstones, oldest first, and damaged ones, each with a sentence."""
        found, damaged = [], []
        for _, path in self._files.new_files():
            try:
                found.append(read_snapshot(path))
            except DataError as error:
                damaged.append((path, str(error)))
        return found, damaged


def publish_tombstone(paths: RunPaths, retired: IndexSnapshot) -> Path:
    """Record that these shards are retired."""
    while (written := write_snapshot(paths.retired, retired)) is None:
        continue  # another process took the number
    return written


def files_to_remove(paths: RunPaths, grace_s: float, now: float | None = None) -> list[Path]:
    """Existing files of shards whose tombstone is older than `grace_s` seconds, decisions before their plies."""
    now = time.time() if now is None else now
    files: list[Path] = []
    for _, tombstone in snapshot_files(paths.retired):
        try:
            marks = file_marks(tombstone)
            if marks is not None and now - marks[1] / 1e9 >= grace_s:
                files += files_of(paths, read_snapshot(tombstone).shards)
        except DataError:
            continue  # its shards are unknown, so they stay
    return files


def files_of(paths: RunPaths, shards: Iterable[CoveredShard]) -> list[Path]:
    """Files of these shards that are unchanged, and their plies."""
    plies: dict[str, dict[str, list[str]]] = {}
    found = []
    for shard in shards:
        if shard.producer not in plies:
            plies[shard.producer] = _plies(paths.shards / shard.producer)
        path = paths.shards / shard.name
        if shard.still_there(str(paths.shards)):
            found.append(path)
        elif file_marks(path) is not None:
            continue  # another file has its name, with plies of its own
        found += [path.with_name(name) for name in plies[shard.producer].get(path.stem, ())]
    return found


def remove_retired_files(paths: RunPaths, grace_s: float) -> int:
    """Remove the files that are due; returns the bytes freed. After a kill the next call continues."""
    freed = 0
    for path in files_to_remove(paths, grace_s):
        freed += (file_marks(path) or (0, 0))[0]
        FILES.remove(path)
    return freed


def _plies(folder: Path) -> dict[str, list[str]]:
    """Names of plies files by shard number."""
    found: dict[str, list[str]] = {}
    for name in FILES.names(folder):
        if name.endswith(".plies.arrow"):
            found.setdefault(name.partition(".")[0], []).append(name)
    return found


def bytes_of(files: Iterable[Path]) -> int:
    """Total size of the existing files, bytes."""
    return sum((file_marks(path) or (0, 0))[0] for path in files)


def shard_bytes(paths: RunPaths) -> int:
    """Total size of the files in `shards/`, bytes."""
    return bytes_of(
        paths.shards / producer / name
        for producer in FILES.folders(paths.shards)
        for name in FILES.names(paths.shards / producer)
    )
