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

from storage.files import file_marks, folders_in, names_in
from storage.runs import RunPaths
from storage.snapshots import (
    CoveredShard,
    IndexSnapshot,
    read_coverage,
    read_snapshot,
    snapshot_files,
    write_snapshot,
)
from telemetry.errors import DataError

TOMBSTONE_NAME = re.compile(r"snap-(\d{6,})\.parquet")


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
            if marks is None or now - marks[1] / 1e9 < grace_s:
                continue
            if due := files_of(paths, read_coverage(tombstone).shards):
                read_snapshot(tombstone)  # else their facts would be lost with them
                files += due
        except DataError:
            continue  # its shards are unknown, so they stay
    return files


def files_of(paths: RunPaths, shards: Iterable[CoveredShard]) -> list[Path]:
    """Files of these shards that are unchanged, and their plies."""
    listed: dict[str, tuple[set[str], dict[str, list[str]]]] = {}
    found = []
    for shard in shards:
        path = paths.shards / shard.name
        if shard.producer not in listed:
            listed[shard.producer] = _listed(path.parent)
        names, plies = listed[shard.producer]
        if path.name in names:  # most are gone in a long run, and a stat of each would cost more than the rest
            if not shard.still_there(str(paths.shards)):
                continue  # another file has its name, with plies of its own
            found.append(path)
        found += [path.with_name(name) for name in plies.get(path.stem, ())]
    return found


def remove_retired_files(paths: RunPaths, grace_s: float) -> int:
    """Remove the files that are due; returns the bytes freed. After a kill the next call continues."""
    freed = 0
    for path in files_to_remove(paths, grace_s):
        freed += (file_marks(path) or (0, 0))[0]
        path.unlink(missing_ok=True)
    return freed


def _listed(folder: Path) -> tuple[set[str], dict[str, list[str]]]:
    """The names in a folder, and those of plies files by shard number."""
    names, plies = set(names_in(folder)), dict[str, list[str]]()
    for name in names:
        if name.endswith(".plies.arrow"):
            plies.setdefault(name.partition(".")[0], []).append(name)
    return names, plies


def bytes_of(files: Iterable[Path]) -> int:
    """Total size of the existing files, bytes."""
    return sum((file_marks(path) or (0, 0))[0] for path in files)


def shard_bytes(paths: RunPaths) -> int:
    """Total size of the files in `shards/`, bytes."""
    return bytes_of(
        paths.shards / producer / name for producer in folders_in(paths.shards) for name in names_in(paths.shards / producer)
    )
