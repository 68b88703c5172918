"""The archive: whole shards as zstd Parquet, which stock DuckDB reads, for rows that nothing will train on again.

Promise: ``archive/<producer>/000012.parquet`` has every column of the shard's decisions, with ``shard`` and ``row`` in front, and
``000012.plies.parquet`` its plies; both appear whole, and rows that come back were verified by their own checksums.
Never: decide what goes there, or take a shard away.
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
    """Where the archived decisions of a shard, named as below ``shards/``, lie or will lie."""
    return (paths.archive / shard).with_suffix(".parquet")


def archive_shard(paths: RunPaths, shard: str) -> None:
    """Put a shard and its plies into the archive, if they are not there.

    Raises:
        DataError: it is damaged.
    """
    decisions = open_shard(paths.shards / shard)
    plies = open_plies(paths.shards / shard, decisions)
    final = archive_path(paths, shard)
    # The plies come first: where the decisions stand, all is there.
    for table, path in ((plies, final.with_suffix(".plies.parquet")), (decisions, final)):
        if not FILES.exists(path):
            located = with_constants(numbered(_plain(table), "row"), shard=shard)
            FILES.publish(path, lambda temp, located=located: _write(located, temp))


def archived(paths: RunPaths, shard: str) -> MappedFile:
    """An archived shard's decisions, as if it were mapped.

    Raises:
        DataError: it is not in the archive, or damaged.
    """
    path = archive_path(paths, shard)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
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
    return MappedFile.of_memory(table, sums)


def _plain(table: pa.Table) -> pa.Table:
    """With text in the place of dictionaries, which stock DuckDB would show as its own kind of column."""
    table = table.replace_schema_metadata(None)
    for place, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(place, field.name, table[field.name].cast(pa.string()))
    return table


def _write(table: pa.Table, temp: Path) -> None:
    pq.write_table(table, temp, compression="zstd", write_page_checksum=True)
