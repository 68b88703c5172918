"""Arrow files with checksums: the schemas of a run's rows, and how tables are written, named and mapped.

Schemas come from the dataclasses of `entente/records/`. Every field change increases `SCHEMA_VERSION`; a reader refuses other
versions. No column holds nulls. A file is an uncompressed IPC *file* with one record batch, so it can be memory-mapped; the
*stream* format would read a file truncated at a batch boundary as a shorter table. The metadata holds CRC32s over row
checksums plus column names and types, and over itself; `map_arrow` verifies both, since Arrow does not notice a flipped byte.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from entente.records.label import Label
from entente.records.rows import Decision, PlayedPhase
from entente.telemetry.errors import DataError, one_line
from storage.files import publish_once

SCHEMA_VERSION = 8
LABEL_SCHEMA_VERSION = 1
"""Of label files alone: labels cost CPU hours, and other rows change more often."""
COMPONENTS = (  # reward components of every row
    "centres_gained",
    "sos_share",
    "draw_share",
    "survival",
    "leader_gap",
    "balance",
    "units_dislodged",
    "units_driven_out",
    "orders_void",
    "orders_bounced",
)
FINAL = "final_"
"""Prefix of a component's name in reward weights: its undiscounted sum to the fork's end."""


def _schema_of(row_type: type) -> pa.Schema:
    hints = get_type_hints(row_type, include_extras=True)
    return pa.schema([pa.field(f.name, hints[f.name].__metadata__[0], nullable=False) for f in fields(row_type)])


DECISION_SCHEMA = _schema_of(Decision)
PHASE_SCHEMA = _schema_of(PlayedPhase)
LABEL_SCHEMA = _schema_of(Label)
_SCHEMAS = {Decision: DECISION_SCHEMA, PlayedPhase: PHASE_SCHEMA, Label: LABEL_SCHEMA}
_WITH_CHECKSUMS = (DECISION_SCHEMA, LABEL_SCHEMA)
"""Schemas whose rows have the column `checksum`, and whose files record their own name."""
_Sums = npt.NDArray[np.uint32]
_CURE = "remove the file, or restore it from a copy."


def to_table(rows: Sequence[Decision] | Sequence[PlayedPhase] | Sequence[Label], row_type: type = Decision) -> pa.Table:
    """Rows as a one-chunk table with checksums."""
    schema = _SCHEMAS[row_type]
    table = pa.table({field.name: pa.array([getattr(row, field.name) for row in rows], field.type) for field in schema}, schema)
    if schema not in _WITH_CHECKSUMS:
        return table
    place = schema.get_field_index("checksum")
    return table.set_column(place, schema.field(place), pa.array(row_checksums(table), pa.uint32()))


def check_tokens(table: pa.Table) -> None:
    """Raises DataError if the token columns of a decision are inconsistent."""
    prompt = _numpy(table["prompt_len"])
    n_completion = _lengths(table["input_ids"]) - prompt
    bounds = as_array(table["legal_offsets"])
    starts, values = bounds.offsets.to_numpy(), _numpy(bounds.values)
    n_bounds = np.diff(starts)
    rules = {
        "prompt_len is between 0 and the number of input_ids": (prompt >= 0) & (n_completion >= 0),
        "there is one behaviour_logprob per completion token": _lengths(table["behaviour_logprobs"]) == n_completion,
        "legal_offsets holds n_completion + 1 numbers": n_bounds == n_completion + 1,
    }
    if all(fits.all() for fits in rules.values()):  # the last rule uses indices that the others check
        inside = np.ones(len(values), bool)
        inside[starts[:-1]] = False
        steps = np.diff(values, prepend=0)
        grows = np.logical_and.reduceat(~inside | (steps > 0), starts[:-1]) if len(starts) > 1 else np.ones(0, bool)
        whole = (values[starts[:-1]] == 0) & (values[starts[1:] - 1] == _lengths(table["legal_ids"]))
        rules["every completion position allows at least one legal id, and all legal ids belong to one"] = grows & whole
    for rule, fits in rules.items():
        if not fits.all():
            row = int(np.argmin(fits))
            name = f"Decision {table['decision_id'][row]} (row {row})"
            raise DataError(f"{name} breaks the rule that {rule}; fix the code that made it.")


class MappedFile:
    """A file verified when mapped: `table` views the mapping, `sums` are its `row_checksums` computed from the content."""

    def __init__(self, content: pa.Buffer, table: pa.Table, sums: _Sums, mark: int) -> None:
        """`mark`: hash of `content`, computed before the verification."""
        self.table = table
        self.sums = sums
        self._content = memoryview(content)
        self._mark = mark

    def is_unchanged(self) -> bool:
        """Whether the file is unchanged since its verification; runs at about memory bandwidth."""
        return xxh3_64_intdigest(self._content) == self._mark


def write_arrow(table: pa.Table, final: Path, metadata: Mapping[str, str], crc: int | None = None) -> bool:
    """Add the checksums to the metadata and publish the table; False, without a change, if `final` exists. `crc` is its
    `content_crc`, if known."""
    crc = content_crc(table) if crc is None else crc
    sealed = {**metadata, "schema_version": str(_version_of(table.schema)), "content_crc32": str(crc)}
    sealed["metadata_crc32"] = str(_metadata_crc(sealed))
    schema = table.schema.with_metadata(sealed)
    batch = pa.RecordBatch.from_arrays([as_array(column) for column in table.columns], schema=schema)

    def write(temp: Path) -> None:
        with pa.OSFile(str(temp), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(batch)

    return publish_once(final, write)


def map_arrow(path: Path, schema: pa.Schema | None = None, cure: str = _CURE) -> MappedFile:
    """Map the file and verify all of it; the mapping stays valid if the file is unlinked.

    With `schema` (None: any), row checksums and the recorded file name are verified too. `cure` is the advice in the message
    for a damaged file. Raises DataError if the file is missing or damaged, or has another schema version, other columns or
    another name.
    """
    try:  # other system errors, such as too many open files, are not the file's fault
        content = _opened(path).read_buffer()
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing.") from error
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} cannot be mapped ({error}); {cure}") from error
    mark = xxh3_64_intdigest(memoryview(content))
    try:
        table = _read_whole(content)
        metadata = metadata_of(table)
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a complete Arrow file ({one_line(error)}); {cure}") from error
    version = _version_of(table.schema if schema is None else schema)
    _check_metadata(path, metadata, cure, version)
    if schema is not None and not table.schema.equals(schema):
        raise DataError(f"{path} does not have the columns of schema version {version}; {cure}")
    sums = row_checksums(table)
    if int(metadata["content_crc32"]) != content_crc(table, sums):
        raise DataError(f"{path} has damaged rows: their checksum is wrong; {cure}")
    if schema in _WITH_CHECKSUMS:
        _check_rows(path, table, sums)
    return MappedFile(content, table, sums, mark)


def _opened(path: Path) -> pa.MemoryMappedFile:
    if path.exists() and not path.is_file():  # in a copied run; opening a pipe would wait for a writer
        raise DataError(f"{path} is not a regular file; {_CURE}")
    return pa.memory_map(str(path))


def _check_rows(path: Path, table: pa.Table, sums: _Sums) -> None:
    written, named = metadata_of(table).get("shard"), f"{path.parent.name}/{path.name}"
    if written != named:
        raise DataError(f"{path} was written as {written}: it is a copy or was renamed; remove it, or restore that name.")
    wrong = np.flatnonzero(sums != _numpy(table["checksum"]))
    if len(wrong):
        raise DataError(f"{path} is damaged: row {wrong[0]} does not have its checksum; {_CURE}")


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file, without verifying its rows; raises DataError if these are missing or damaged."""
    try:
        with pa.ipc.open_file(_opened(path)) as reader:
            metadata = metadata_of(reader)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing.") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} is not a complete Arrow file ({one_line(error)}); {_CURE}") from error
    _check_metadata(path, metadata)
    return metadata


def metadata_of(table: pa.Table | pa.RecordBatchFileReader) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}


def _metadata_crc(metadata: Mapping[str, str]) -> int:
    entries = sorted(f"{key}={value}" for key, value in metadata.items() if key != "metadata_crc32")
    return zlib.crc32("\0".join(entries).encode())


def _version_of(schema: pa.Schema) -> int:
    return LABEL_SCHEMA_VERSION if schema.equals(LABEL_SCHEMA) else SCHEMA_VERSION


def _check_metadata(path: Path, metadata: Mapping[str, str], cure: str = _CURE, reads: int = SCHEMA_VERSION) -> None:
    version = metadata.get("schema_version", "none")
    if version != str(reads):
        raise DataError(f"{path} has schema version {version}, this program reads {reads}; use the release that wrote it.")
    if metadata.get("metadata_crc32") != str(_metadata_crc(metadata)):
        raise DataError(f"{path} has damaged metadata; {cure}")


def _read_whole(content: pa.Buffer) -> pa.Table:
    with pa.ipc.open_file(content) as reader:
        if reader.num_record_batches != 1:
            raise ValueError(f"it has {reader.num_record_batches} record batches, not 1")
        table = pa.Table.from_batches([reader.get_batch(0)])
    # First, because reading columns with offsets out of range would crash the process.
    table.validate(full=True)
    if any(column.null_count for column in table.columns):
        raise ValueError("it holds nulls")
    return table


def content_crc(table: pa.Table, sums: _Sums | None = None) -> int:
    """CRC32 of the content without the metadata. `sums`: row checksums; None: use those of the rows, or compute them."""
    if sums is None:
        sums = _numpy(table["checksum"]) if table.schema in _WITH_CHECKSUMS else row_checksums(table)
    layout = ";".join(f"{field.name} {field.type}" for field in table.schema)
    return zlib.crc32(sums.tobytes(), zlib.crc32(layout.encode()))


def row_checksums(table: pa.Table) -> npt.NDArray[np.uint32]:
    """uint32 [rows] CRC32 over all columns of each row except `checksum`: fixed-width values and byte lengths of strings and
    lists, then their content. The lengths make a moved boundary between two rows or strings change the sum."""
    n_rows = table.num_rows
    heads: list[npt.NDArray[np.uint8]] = []
    bodies: list[list[bytes | memoryview]] = []
    for column in (table.drop_columns("checksum") if "checksum" in table.column_names else table).columns:
        for offsets, width, content in _parts(as_array(column)):
            if offsets is None:
                heads.append(np.frombuffer(content, np.uint8).reshape(n_rows, width))
                continue
            ends = np.multiply(offsets, width, dtype=np.int64)
            heads.append((ends[1:] - ends[:-1]).view(np.uint8).reshape(n_rows, 8))
            bodies.append([content[start:end] for start, end in pairwise(ends.tolist())])
    head = np.concatenate(heads, axis=1) if heads else np.zeros((n_rows, 0), np.uint8)
    rows = zip(head, *bodies, strict=True)
    return np.array([zlib.crc32(b"".join(row)) for row in rows], np.uint32)


_Part = tuple[npt.NDArray[np.int32] | None, int, bytes | memoryview]
"""Offsets of the rows (None if their widths are equal), bytes per value, and all bytes."""


def _parts(array: pa.Array) -> list[_Part]:
    """The bytes of a column. A list of strings has two parts: string lengths and text."""
    if isinstance(array, pa.StringArray):
        return [(*_text(array),)]
    if isinstance(array, pa.ListArray):
        offsets, values = array.offsets.to_numpy(), array.values
        if isinstance(values, pa.StringArray):
            ends, width, text = _text(values)
            lengths = ends[1:] - ends[:-1]
            return [(offsets, lengths.itemsize, lengths.tobytes()), (ends[offsets], width, text)]
        return [(offsets, *_content(values))]
    if isinstance(array, pa.DictionaryArray):
        return _parts(array.dictionary_decode())
    return [(None, *_content(array))]


def _text(array: pa.StringArray) -> tuple[npt.NDArray[np.int32], int, bytes]:
    _, offsets, text = array.buffers()
    if offsets is None or text is None or len(array) == 0:
        return np.zeros(len(array) + 1, np.int32), 1, b""
    ends = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4)
    return ends, 1, bytes(text)  # slices of bytes are cheaper than views


def _content(array: pa.Array) -> tuple[int, memoryview]:
    width, (_, values) = array.type.byte_width, array.buffers()
    if values is None:
        return width, memoryview(b"")
    return width, memoryview(values)[array.offset * width : (array.offset + len(array)) * width]


def _numpy(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    return as_array(column).to_numpy(zero_copy_only=True)


def _lengths(column: pa.ChunkedArray) -> npt.NDArray[np.int32]:
    lengths: npt.NDArray[np.int32] = np.diff(as_array(column).offsets.to_numpy())
    return lengths


def as_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The column as one array, without a copy if it has one chunk, as in every published file."""
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column
