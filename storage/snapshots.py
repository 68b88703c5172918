"""Index snapshots: the facts of some shards in one Parquet file, so that a new index need not read every shard.

`index/snap-000012.parquet` is one part of a run's facts (`storage/parts.py`); `retired/snap-000001.parquet` has the same layout.
A file is published once and never changes. It has the facts of every decision of the covered shards, with reward components and
without returns, so it serves every blend. Its metadata names those shards and the file beside it with the facts of their plies,
and has checksums of both. A shard that is gone, or whose size or write time differs, counts as not covered. Stock DuckDB reads
both files. The metadata can be read alone: `read_coverage` reads no row.

Shards remain the truth: deleting `index/` costs time only. A snapshot does not prove that a shard is intact now. Damage that
leaves size and write time unchanged is found when a row of the shard is first gathered, or its plies are first read.
"""

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.arrow_files import metadata_crc, metadata_of
from storage.facts import DECISION_FACTS, PLY_FACTS
from storage.files import file_marks, names_in, publish_once
from storage.schema import SCHEMA_VERSION
from telemetry.errors import DataError

_LAYOUT = "1"  # version of the metadata's layout
_NAME = re.compile(r"snap-(\d{6,})(\.[0-9a-f]{8}\.plies)?\.parquet")
NO_ROWS = -1
"""Newest version of a shard without rows, and of one whose rows were not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoveredShard:
    """A shard that was verified and whose facts are in an index."""

    producer: str
    number: int
    """The number in its name."""
    next_start_group: int
    """The number in the name of the producer's next shard."""
    start_groups: tuple[int, ...]
    """Start groups that have rows in it."""
    size: int
    """Size of the file, bytes."""
    written_ns: int
    """Write time of the file, nanoseconds, by its file system."""
    newest_version: int = field(compare=False)
    """Largest policy version of its rows; NO_ROWS without rows."""

    @property
    def name(self) -> str:
        """Its name in rows and ledgers, below `shards/`."""
        return f"{self.producer}/{self.number:06d}.arrow"

    def still_there(self, shards: str) -> bool:
        """Whether the folder `shards` has a file of this name, size and write time."""
        return file_marks(f"{shards}/{self.name}") == (self.size, self.written_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSnapshot:
    """The content of a snapshot."""

    shards: tuple[CoveredShard, ...]
    """The covered shards."""
    decisions: pa.Table
    """Their decisions, with the columns of `facts.DECISION_FACTS`."""
    plies: pa.Table
    """Their plies, with the columns of `facts.PLY_FACTS`."""

    def subset(self, shards: Sequence[CoveredShard]) -> "IndexSnapshot":
        """The part of it for these shards."""
        if len(shards) == len(self.shards):
            return self
        among_them = pc.field("shard").isin([shard.name for shard in shards])
        decisions, plies = (table.filter(among_them) for table in (self.decisions, self.plies))
        return IndexSnapshot(shards=tuple(shards), decisions=decisions, plies=plies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What the metadata of a snapshot say."""

    path: Path
    shards: tuple[CoveredShard, ...]
    """The covered shards."""
    rows: int
    """Its decisions."""


def write_snapshot(folder: Path, snapshot: IndexSnapshot) -> Path | None:
    """Publish a snapshot in `folder` under the next number; None if another process took the number."""
    final = folder / f"snap-{max(_numbers(folder), default=0) + 1:06d}.parquet"
    plies_crc = _content_crc(snapshot.plies)
    plies = final.with_name(f"{final.stem}.{plies_crc:08x}.plies.parquet")
    _publish(snapshot.plies, plies, {})
    metadata = {
        "layout": _LAYOUT,
        "name": f"{folder.name}/{final.name}",
        "schema_version": str(SCHEMA_VERSION),
        **_shards_text(snapshot.shards),
        "plies": plies.name,
        "plies_crc32": str(plies_crc),
        "content_crc32": str(_content_crc(snapshot.decisions)),
    }
    metadata["metadata_crc32"] = str(metadata_crc(metadata))
    return final if _publish(snapshot.decisions, final, metadata) else None


def remove_snapshot(path: Path) -> None:
    """Remove a snapshot, then its plies. A reader that is opening it reads the shards instead."""
    path.unlink(missing_ok=True)
    for name in names_in(path.parent):
        if name.startswith(f"{path.stem}.") and _NAME.fullmatch(name):
            path.with_name(name).unlink(missing_ok=True)


def snapshot_files(folder: Path) -> list[tuple[int, Path]]:
    """Numbers and files of the snapshots in `folder`, in ascending order."""
    return sorted((number, path) for path, number in _files(folder) if path.suffixes == [".parquet"])


def read_coverage(path: Path) -> Coverage:
    """What a snapshot covers, from its metadata alone. Its rows may still be damaged.

    Raises:
        DataError: the metadata are damaged, or written by another version or under another name.
        FileNotFoundError: it does not exist.
    """
    with _opened(path) as file:
        found = _metadata(path, {key.decode(): value.decode() for key, value in (file.schema_arrow.metadata or {}).items()})
        return Coverage(path=path, shards=tuple(_shards_of(found)), rows=file.metadata.num_rows)


def read_snapshot(path: Path) -> IndexSnapshot:
    """A verified snapshot.

    Raises:
        DataError: it is damaged, or written by another version or under another name.
        FileNotFoundError: it does not exist.
    """
    decisions, metadata = _read_parquet(path)
    found = _metadata(path, metadata)
    _check(path, decisions, DECISION_FACTS, found["content_crc32"])
    beside = path.with_name(found["plies"])
    try:
        plies, _ = _read_parquet(beside)
    except FileNotFoundError as error:
        raise DataError(f"{beside} is missing, which {path.name} names; {_CURE}") from error
    _check(beside, plies, PLY_FACTS, found["plies_crc32"])
    return IndexSnapshot(
        shards=tuple(_shards_of(found)),
        decisions=decisions.replace_schema_metadata(None),
        plies=plies.replace_schema_metadata(None),
    )


def _metadata(path: Path, found: dict[str, str]) -> dict[str, str]:
    """The checked metadata of a snapshot."""
    if not {"layout", "metadata_crc32", "newest_versions"} <= found.keys():
        raise DataError(f"{path} is no index snapshot of Entente; {_CURE}")
    if found["metadata_crc32"] != str(metadata_crc(found)):
        raise DataError(f"{path} has damaged metadata; {_CURE}")
    if (found["layout"], found["schema_version"]) != (_LAYOUT, str(SCHEMA_VERSION)):
        raise DataError(
            f"{path} has layout {found['layout']} and schema version {found['schema_version']}, this program reads {_LAYOUT} and "
            f"{SCHEMA_VERSION}; {_CURE}"
        )
    # A tombstone has the same layout, but the shards that it names are removed, so the two must not be confused.
    if found.get("name", named := f"{path.parent.name}/{path.name}") != named:
        raise DataError(f"{path} was written as {found['name']}: it is a copy or was renamed; {_CURE}")
    return found


_CURE = "the index is read without it; remove the file."


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(pa.memory_map(str(path))) as file:
            yield file
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a whole Parquet file ({' '.join(str(error).split())}); {_CURE}") from error


def _read_parquet(path: Path) -> tuple[pa.Table, dict[str, str]]:
    with _opened(path) as file:
        table = file.read().combine_chunks()
        table.validate()
        return table, metadata_of(table)


def _check(path: Path, table: pa.Table, schema: pa.Schema, crc: str) -> None:
    if not table.schema.equals(schema) or any(column.null_count for column in table.columns):
        raise DataError(f"{path} does not have the columns of schema version {SCHEMA_VERSION}; {_CURE}")
    if crc != str(_content_crc(table)):
        raise DataError(f"{path} has damaged rows: their checksum is wrong; {_CURE}")


def _publish(table: pa.Table, final: Path, metadata: dict[str, str]) -> bool:
    sealed = table.replace_schema_metadata(metadata)
    return publish_once(final, lambda temp: pq.write_table(sealed, temp, compression="zstd", compression_level=1))


def _content_crc(table: pa.Table) -> int:
    """CRC32 of the values, column after column, independent of their encoding in the file and of chunks."""
    crc = 0
    for column in table.columns:
        if pa.types.is_string(column.type):
            texts = [_text(chunk) for chunk in column.chunks]
            for part in (*(np.diff(ends) for ends, _ in texts), *(text for _, text in texts)):
                crc = zlib.crc32(part, crc)
        else:
            for chunk in column.chunks:
                crc = zlib.crc32(chunk.to_numpy(), crc)
    return crc


def _text(array: pa.StringArray) -> tuple[npt.NDArray[np.int32], memoryview]:
    """The end offsets of the strings, and their concatenated bytes."""
    _, offsets, text = array.buffers()
    if offsets is None or text is None or len(array) == 0:
        return np.zeros(len(array) + 1, np.int32), memoryview(b"")
    ends = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4)
    return ends, memoryview(text)[ends[0] : ends[-1]]


def _shards_text(shards: Sequence[CoveredShard]) -> dict[str, str]:
    """Two entries of the metadata, JSON by producer, of each of its shards: `shards` has [number, next start group, size, write
    time, start groups], and `newest_versions` the newest version.
    """
    ordered = sorted(shards, key=lambda shard: (shard.producer, shard.number))
    by_producer = {producer: list(some) for producer, some in groupby(ordered, key=lambda shard: shard.producer)}
    entries: dict[str, list[Any]] = {
        producer: [[s.number, s.next_start_group, s.size, s.written_ns, list(s.start_groups)] for s in some]
        for producer, some in by_producer.items()
    }
    versions = {producer: [shard.newest_version for shard in some] for producer, some in by_producer.items()}
    return {name: json.dumps(each, separators=(",", ":")) for name, each in (("shards", entries), ("newest_versions", versions))}


def _shards_of(metadata: Mapping[str, str]) -> Iterator[CoveredShard]:
    versions = json.loads(metadata["newest_versions"])
    for producer, shards in json.loads(metadata["shards"]).items():
        for (number, after, size, written, groups), version in zip(shards, versions[producer], strict=True):
            yield CoveredShard(
                producer=producer,
                number=number,
                next_start_group=after,
                start_groups=tuple(groups),
                size=size,
                written_ns=written,
                newest_version=version,
            )


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Files of snapshots with their numbers; none if there is no such folder."""
    for name in names_in(folder):
        if match := _NAME.fullmatch(name):
            yield folder / name, int(match[1])


def _numbers(folder: Path) -> set[int]:
    return {number for _, number in _files(folder)}
