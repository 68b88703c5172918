"""Arrow IPC files with checksums: how the tables of a run are written, named and read.

A file is an uncompressed IPC *file* with one record batch, so it can be memory-mapped. It is not the *stream* format, which
reads a file cut at a batch boundary as a shorter table. Its metadata holds a CRC32 over the row checksums and the columns'
names and types, and a CRC32 over the metadata. `read_arrow` verifies both; Arrow itself does not notice a flipped byte.
"""

import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from entente.telemetry.errors import DataError
from storage.files import publish_once
from storage.schema import SCHEMA_VERSION, as_array, row_checksums

_Sums = npt.NDArray[np.uint32]


class MappedFile:
    """A file that was verified when it was mapped.

    Attributes:
        table: its content; the columns are views of the mapping.
        sums: `schema.row_checksums` of the table, computed from the content.
    """

    def __init__(self, content: pa.Buffer, table: pa.Table, sums: _Sums, mark: int) -> None:
        """`mark` is the hash of `content`, computed before the verification."""
        self.table = table
        self.sums = sums
        self._content = memoryview(content)
        self._mark = mark

    def is_unchanged(self) -> bool:
        """Whether no byte of the file has changed since it was verified; runs at about memory bandwidth."""
        return xxh3_64_intdigest(self._content) == self._mark


def content_crc(table: pa.Table, sums: _Sums | None = None) -> int:
    """CRC32 of the content without the metadata; `sums` are the row checksums, if already known."""
    layout = ";".join(f"{field.name} {field.type}" for field in table.schema)
    return zlib.crc32((row_checksums(table) if sums is None else sums).tobytes(), zlib.crc32(layout.encode()))


def write_arrow(table: pa.Table, final: Path, metadata: dict[str, str], sums: _Sums | None = None) -> bool:
    """Add the checksums to the metadata and publish the table as `final`; False if a file of that name exists, which is kept.

    Args:
        sums: its row checksums, if already known.
    """
    sealed = {**metadata, "schema_version": str(SCHEMA_VERSION), "content_crc32": str(content_crc(table, sums))}
    sealed["metadata_crc32"] = str(metadata_crc(sealed))
    schema = table.schema.with_metadata(sealed)
    batch = pa.RecordBatch.from_arrays([as_array(column) for column in table.columns], schema=schema)

    def write(temp: Path) -> None:
        with pa.OSFile(str(temp), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(batch)

    return publish_once(final, write)


_CURE = "remove the file, or restore it from a copy."


def read_arrow(path: Path, schema: pa.Schema | None = None, cure: str = _CURE) -> pa.Table:
    """The verified table in `path`; see `map_arrow`. It stays valid if the file is unlinked."""
    return map_arrow(path, schema, cure).table


def map_arrow(path: Path, schema: pa.Schema | None = None, cure: str = _CURE) -> MappedFile:
    """Map the file and verify all of it.

    Args:
        schema: the columns that it must have; None: any.
        cure: what to do about a damaged file, for the message.

    Raises:
        DataError: the file is missing or damaged, or has another schema version or other columns.
    """
    try:
        content = pa.memory_map(str(path)).read_buffer()
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing.") from error
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} cannot be mapped ({error}); {cure}") from error
    mark = xxh3_64_intdigest(memoryview(content))
    try:
        table = _read_whole(content)
        found = metadata_of(table)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a whole Arrow file ({' '.join(str(error).split())}); {cure}") from error
    _check_metadata(path, found, cure)
    if schema is not None and not table.schema.equals(schema):
        raise DataError(f"{path} does not have the columns of schema version {SCHEMA_VERSION}; {cure}")
    sums = row_checksums(table)
    if int(found["content_crc32"]) != content_crc(table, sums):
        raise DataError(f"{path} has damaged rows: their checksum is wrong; {cure}")
    return MappedFile(content, table, sums, mark)


def map_rows(path: Path, schema: pa.Schema) -> MappedFile:
    """Map a file of rows that have checksums, and verify that it has its own name too.

    Raises:
        DataError: see `map_arrow`; or the file is a copy.
    """
    file = map_arrow(path, schema)
    written, named = metadata_of(file.table).get("shard"), f"{path.parent.name}/{path.name}"
    if written != named:
        raise DataError(f"{path} was written as {written}: it is a copy or was renamed; remove it, or name it so.")
    wrong = np.flatnonzero(file.sums != as_array(file.table["checksum"]).to_numpy())
    if len(wrong):
        raise DataError(f"{path} is damaged: row {wrong[0]} does not have its checksum; {_CURE}")
    return file


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file, without its rows, which may still be damaged.

    Raises:
        DataError: the file is missing, or its metadata are damaged.
    """
    try:
        with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
            found = {key.decode(): value.decode() for key, value in (reader.schema.metadata or {}).items()}
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing.") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} is not a whole Arrow file ({' '.join(str(error).split())}); {_CURE}") from error
    _check_metadata(path, found)
    return found


def metadata_of(table: pa.Table) -> dict[str, str]:
    """The table's metadata as text."""
    return {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}


def metadata_crc(metadata: Mapping[str, str]) -> int:
    """CRC32 of all entries except the one that stores it."""
    entries = sorted(f"{key}={value}" for key, value in metadata.items() if key != "metadata_crc32")
    return zlib.crc32("\0".join(entries).encode())


def _check_metadata(path: Path, found: Mapping[str, str], cure: str = _CURE) -> None:
    version = found.get("schema_version", "none")
    if version != str(SCHEMA_VERSION):
        raise DataError(
            f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}; use the release that wrote the run."
        )
    if found.get("metadata_crc32") != str(metadata_crc(found)):
        raise DataError(f"{path} has damaged metadata; {cure}")


def _read_whole(content: pa.Buffer) -> pa.Table:
    with pa.ipc.open_file(content) as reader:
        if reader.num_record_batches != 1:
            raise ValueError(f"it has {reader.num_record_batches} record batches, not 1")
        table = pa.Table.from_batches([reader.get_batch(0)])
    # First of all: to read columns whose offsets are out of range would crash the process.
    table.validate(full=True)
    if any(column.null_count for column in table.columns):
        raise ValueError("it holds nulls")
    return table
