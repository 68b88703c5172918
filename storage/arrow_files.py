"""Arrow IPC files that notice their own damage: how every table of this room is written, named and read.

Promise: a file is uncompressed IPC *file* format with one record batch, so that reading it is a memory
mapping. Its metadata is sealed: a CRC32 over the row checksums (content, lengths, number of rows, column
names and types) and one over the metadata itself. ``read_arrow`` returns a table only if both are right; a
flipped byte is otherwise read without a word.
Never: the *stream* format, which a cut at a batch boundary shortens silently; and never a compressed body.
"""

import zlib
from pathlib import Path

import pyarrow as pa

from storage.files import FILES
from storage.schema import SCHEMA_VERSION, as_array, row_checksums
from telemetry.errors import DataError


def content_crc(table: pa.Table) -> int:
    """CRC32 of what the table holds, apart from its metadata."""
    layout = ";".join(f"{field.name} {field.type}" for field in table.schema)
    return zlib.crc32(row_checksums(table).tobytes(), zlib.crc32(layout.encode()))


def write_arrow(table: pa.Table, final: Path, metadata: dict[str, str]) -> bool:
    """Seal the table and publish it as ``final``; False if that name was taken, whose file then stands."""
    sealed = {**metadata, "schema_version": str(SCHEMA_VERSION), "content_crc32": str(content_crc(table))}
    sealed["metadata_crc32"] = str(_metadata_crc(sealed))
    schema = table.schema.with_metadata(sealed)
    batch = pa.RecordBatch.from_arrays([as_array(column) for column in table.columns], schema=schema)

    def write(temp: Path) -> None:
        with pa.OSFile(str(temp), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(batch)

    return FILES.publish(final, write)


def read_arrow(path: Path, schema: pa.Schema | None = None) -> pa.Table:
    """Map the file and verify all of it; a held table stays valid, even if the file is unlinked.

    Raises:
        DataError: the file is missing, damaged, of another schema version, or of other columns.
    """
    try:
        source = FILES.open(path)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing.") from error
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} cannot be mapped ({error}); {_CURE}") from error
    try:
        table = _read_whole(source)
        found = metadata_of(table)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a whole Arrow file ({' '.join(str(error).split())}); {_CURE}") from error
    version = found.get("schema_version", "none")
    if version != str(SCHEMA_VERSION):
        raise DataError(
            f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}; use the release that wrote the run."
        )
    if found.get("metadata_crc32") != str(_metadata_crc(found)):
        raise DataError(f"{path} has damaged metadata; {_CURE}")
    if schema is not None and not table.schema.equals(schema):
        raise DataError(f"{path} does not have the columns of schema version {SCHEMA_VERSION}; {_CURE}")
    if int(found["content_crc32"]) != content_crc(table):
        raise DataError(f"{path} has damaged rows: their checksum is wrong; {_CURE}")
    return table


def metadata_of(table: pa.Table) -> dict[str, str]:
    """The table's metadata as text."""
    return {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}


_CURE = "remove the file, or restore it from a copy."


def _read_whole(source: pa.NativeFile) -> pa.Table:
    with pa.ipc.open_file(source) as reader:
        if reader.num_record_batches != 1:
            raise ValueError(f"it has {reader.num_record_batches} record batches, not 1")
        table = pa.Table.from_batches([reader.get_batch(0)])
    # offsets out of range would make later reads crash, so this comes before any other look at the columns
    table.validate(full=True)
    if any(column.null_count for column in table.columns):
        raise ValueError("it holds nulls")
    return table


def _metadata_crc(metadata: dict[str, str]) -> int:
    entries = sorted(f"{key}={value}" for key, value in metadata.items() if key != "metadata_crc32")
    return zlib.crc32("\0".join(entries).encode())
