"""The Arrow schemas of decisions, plies and lessons, made from the dataclasses of `entente/records/`, and the row checksum.

`SCHEMA_VERSION` is raised with every change of a field; a reader refuses any other version. No column holds nulls. This module
touches no files (`storage/arrow_files.py` does).
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from entente.records.lesson import Lesson
from entente.records.rows import Decision, Ply
from entente.telemetry.errors import DataError

SCHEMA_VERSION = 7
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
"""Prefix of a component's name in a blend: its undiscounted sum to the fork's end."""


def _schema_of(row_type: type) -> pa.Schema:
    hints = get_type_hints(row_type, include_extras=True)
    return pa.schema([pa.field(f.name, hints[f.name].__metadata__[0], nullable=False) for f in fields(row_type)])


DECISION_SCHEMA = _schema_of(Decision)
PLY_SCHEMA = _schema_of(Ply)
LESSON_SCHEMA = _schema_of(Lesson)
_SCHEMAS = {Decision: DECISION_SCHEMA, Ply: PLY_SCHEMA, Lesson: LESSON_SCHEMA}


def to_table(
    rows: Sequence[Decision] | Sequence[Ply] | Sequence[Lesson],
    row_type: type = Decision,
    provenance: Mapping[str, str] | None = None,
) -> pa.Table:
    """Rows as one Arrow table in one chunk, with the schema version and `provenance` as metadata."""
    schema = _SCHEMAS[row_type]
    columns = {field.name: pa.array([getattr(row, field.name) for row in rows], field.type) for field in schema}
    table = pa.table(columns, schema=schema)
    if "checksum" in columns:
        place = schema.get_field_index("checksum")
        table = table.set_column(place, schema.field(place), pa.array(row_checksums(table), pa.uint32()))
    return table.replace_schema_metadata({**(provenance or {}), "schema_version": str(SCHEMA_VERSION)})


def check_tokens(table: pa.Table) -> None:
    """Check that the token columns of decisions fit one another.

    Raises:
        DataError: a row breaks one of the rules.
    """
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
    if all(fits.all() for fits in rules.values()):  # the last rule indexes by what the others check
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
            raise DataError(f"{name} breaks the rule that {rule}; mend what made it.")


def row_checksums(table: pa.Table) -> npt.NDArray[np.uint32]:
    """uint32 [rows] CRC32 over all columns of each row except `checksum`.

    The fixed-width values and the byte lengths of strings and lists come first, then the content of strings and lists. The
    lengths are included so that a moved boundary between two rows or strings changes the sum.
    """
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
    """The bytes of a column. A list of strings has two parts: the lengths of the strings, and their text."""
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
    """Bytes per value of a numeric array, and all its values as bytes."""
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
    """The column as one array; without a copy if it has one chunk, as in every published file."""
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column
