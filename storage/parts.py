"""The parts of an index: snapshots in `index/`, each with the facts of some shards; together they cover a run's older shards.

A part is written when enough shards are new, with their facts alone. So the bytes written follow the new shards and not the past.
Eight parts of one size class are merged into one part of the next class; a large part is never rewritten. Each fact is therefore
written a few times, and a run has few parts for its rows.

If two parts cover a shard, they say the same of it, and one of them is used. So a merged part is published before those that it
replaces are removed, and the files of earlier versions, where every snapshot covered the whole run, are parts like any others.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa

from storage.snapshots import (
    Coverage,
    CoveredShard,
    IndexSnapshot,
    read_coverage,
    read_snapshot,
    remove_snapshot,
    snapshot_files,
    write_snapshot,
)
from telemetry.errors import DataError

MERGED = 8
"""Parts that are merged into one, and the ratio of two size classes."""
LARGE_ROWS = 8**5
"""A part of so many decisions is not rewritten. Merged parts have at most eight times as many: they take tens of megabytes."""


def read_parts(folder: Path) -> tuple[list[Coverage], list[tuple[Path, str]]]:
    """What each part covers, oldest first, from their metadata alone; and the damaged ones, each with a sentence."""
    found, damaged = [], []
    for _, path in snapshot_files(folder):
        try:
            found.append(read_coverage(path))
        except FileNotFoundError:
            continue  # it was merged meanwhile: its shards are in a newer part, or are read themselves
        except DataError as error:
            damaged.append((path, str(error)))
    return found, damaged


def choose_parts(sizes: Sequence[int]) -> list[int]:
    """Which parts to merge now: the places in `sizes` of eight parts of the smallest size class that has so many; else none.

    Args:
        sizes: decisions of each part.
    """
    classes: dict[int, list[int]] = defaultdict(list)
    for place, rows in enumerate(sizes):
        if rows < LARGE_ROWS:
            classes[rows.bit_length() // 3].append(place)
    full = [number for number, places in sorted(classes.items()) if len(places) >= MERGED]
    return classes[full[0]][:MERGED] if full else []


class Parts:
    """The parts that an index knows; only the process that writes snapshots changes files.

    Attributes:
        covered: those that the index uses, each with the shards that it is used for. No two are used for one shard.
        unused: files that cover nothing that the index uses.
        spoiled: names of shards that turned out damaged: parts are rewritten without them, so that the next index reads the file.
    """

    def __init__(self) -> None:
        self.covered: list[Coverage] = []
        self.unused: list[Path] = []
        self.spoiled: set[str] = set()

    def write(self, folder: Path, snapshot: IndexSnapshot) -> Path | None:
        """Publish a part; None if another process took its number."""
        if (written := write_snapshot(folder, snapshot)) is not None:
            self.covered.append(Coverage(path=written, shards=snapshot.shards, rows=snapshot.decisions.num_rows))
        return written

    def merge(self, folder: Path, is_needed: Callable[[CoveredShard], bool]) -> None:
        """Merge parts while eight are of one class, rewrite some, and remove the files that are not used any more.

        Args:
            is_needed: whether the facts of a covered shard are still needed; those of other shards are dropped.
        """
        while going := self._to_rewrite():
            facts = list[IndexSnapshot]()
            for part in going:
                try:
                    found = read_snapshot(part.path)
                except (DataError, FileNotFoundError):  # the next index that opens says so, and reads its shards
                    self.covered.remove(part)
                    break
                needed = {shard.name for shard in part.shards if is_needed(shard)}
                facts.append(found.subset([shard for shard in found.shards if shard.name in needed]))
            if len(facts) < len(going):
                continue
            self.covered = [part for part in self.covered if part not in going]
            self.unused += [part.path for part in going]
            if (left := _joined(facts)).shards and self.write(folder, left) is None:
                return
        for path in self.unused:
            remove_snapshot(path)
        self.unused = []
        self.spoiled = set()

    def _to_rewrite(self) -> list[Coverage]:
        """Parts that become one: one with a spoiled shard, or as many as `choose_parts` says."""
        for part in self.covered:
            if self.spoiled and any(shard.name in self.spoiled for shard in part.shards):
                return [part]
        return [self.covered[place] for place in choose_parts([part.rows for part in self.covered])]


def _joined(parts: Sequence[IndexSnapshot]) -> IndexSnapshot:
    return IndexSnapshot(
        shards=tuple(shard for part in parts for shard in part.shards),
        decisions=pa.concat_tables([part.decisions for part in parts]),
        plies=pa.concat_tables([part.plies for part in parts]),
    )
