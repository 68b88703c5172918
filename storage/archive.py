"""The archive: complete shards as zstd Parquet, for rows that no step will train on again. Stock DuckDB reads them.

`archive/<producer>/000012.parquet` has all columns of the shard's decisions, after the columns `shard` and `row`;
`000012.plies.parquet` has its plies. Reading verifies the row checksums.
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from storage.arrow_files import MappedFile
from storage.facts import numbered, with_constants
from storage.files import FILES
from storage.runs import RunPaths
from storage.schema import DECISION_SCHEMA, as_array, row_checksums
from storage.shards import open_plies, open_shard
from telemetry.errors import DataError


def archive_path(paths: RunPaths, shard: str) -> Path:
    """Path of the archived decisions of a shard, which is named as below `shards/`."""
    return (paths.archive / shard).with_suffix(".parquet")


def archive_shard(paths: RunPaths, shard: str) -> None:
    """Copy a shard and its plies into the archive, unless they are there.

    Raises:
        DataError: the shard is damaged.
    """
    decisions = open_shard(paths.shards / shard)
    plies = open_plies(paths.shards / shard, decisions)
    final = archive_path(paths, shard)
    # Plies first: if the decisions exist, the archive of the shard is complete.
    for table, path in ((plies, final.with_suffix(".plies.parquet")), (decisions, final)):
        if not FILES.exists(path):
            located = with_constants(numbered(_plain(table), "row"), shard=shard)
            FILES.publish(path, lambda temp, located=located: _write(located, temp))


def archived(paths: RunPaths, shard: str) -> MappedFile:
    """The decisions of an archived shard.

    Raises:
        DataError: it is not in the archive, or is damaged.
    """
    path = archive_path(paths, shard)
    try:
        with pq.ParquetFile(FILES.fetch(path), page_checksum_verification=True) as file:
            located = file.read()
            table = located.select(DECISION_SCHEMA.names).cast(DECISION_SCHEMA).combine_chunks()
            written = set(located["shard"].to_pylist())
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing.") from error
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{path} is not a whole Parquet file ({' '.join(str(error).split())}); restore it from a copy."
        ) from error
    if written - {shard}:
        raise DataError(f"{path} holds rows of shard {min(written - {shard})}: it is a copy or was renamed; restore its own.")
    sums = row_checksums(table)
    if (sums != as_array(table["checksum"]).to_numpy()).any():
        raise DataError(f"{path} has damaged rows: their checksum is wrong; restore it from a copy.")
    return MappedFile.from_memory(table, sums)


def _plain(table: pa.Table) -> pa.Table:
    """The table with text instead of dictionaries, which stock DuckDB would show as an enum."""
    table = table.replace_schema_metadata(None)
    for place, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(place, field.name, table[field.name].cast(pa.string()))
    return table


def _write(table: pa.Table, temp: Path) -> None:
    pq.write_table(table, temp, compression="zstd", write_page_checksum=True)
