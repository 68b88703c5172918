"""Conversion of query results: Arrow unchanged, or values that a terminal, CSV, JSON or Parquet can hold.

DuckDB itself converts a value that a table or CSV cannot hold to text. So an infinite date, an interval or a variant looks as in
DuckDB's own client. Columns keep their order, and columns of equal name keep their own values.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Literal

import duckdb
import pyarrow as pa
from duckdb.sqltypes import DuckDBPyType

Form = Literal["arrow", "table", "csv", "json", "parquet"]
_FLOATS = {"float", "double"}
_PLAIN = _FLOATS | {
    "boolean", "tinyint", "smallint", "integer", "bigint", "utinyint", "usmallint", "uinteger", "ubigint", "varchar",
}  # fmt: skip
"""Types that a CSV writer can write unchanged."""


def convert(relation: duckdb.DuckDBPyRelation, form: Form) -> duckdb.DuckDBPyRelation:
    """The same answer with columns that `form` can hold; files get column names that differ."""
    if form == "arrow":
        return relation
    names = relation.columns if form == "table" else unique_names(relation.columns)
    columns = [
        f"{_column(f'#{place}', kind, form)} AS {_quoted(name)}"
        for place, (kind, name) in enumerate(zip(relation.types, names, strict=True), start=1)
    ]
    return relation.project(", ".join(columns))


def unique_names(names: Sequence[str]) -> list[str]:
    """The names with a number behind those that came before: a, a_1."""
    found: list[str] = []
    for name in names:
        number, fresh = 0, name
        while fresh.lower() in (taken.lower() for taken in found):
            number += 1
            fresh = f"{name}_{number}"
        found.append(fresh)
    return found


def json_lines(answer: pa.Table) -> Iterator[str]:
    """Rows of a result in the form "json", each as one JSON object on one line; NaN becomes null."""
    names = [json.dumps(name) for name in answer.column_names]
    for batch in answer.to_batches(max_chunksize=10_000):
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            members = (f"{name}: {_json(value)}" for name, value in zip(names, values, strict=True))
            yield f"{{{', '.join(members)}}}"


def _json(text: str | None) -> str:
    """DuckDB's JSON as strict ASCII JSON: NaN and infinities become null, control characters are escaped."""
    if text is None:
        return "null"
    if "NaN" in text or "Infinity" in text or not text.isascii():
        return json.dumps(json.loads(text, parse_constant=lambda _: None))
    return text.replace("\x7f", "\\u007f")


def _column(column: str, kind: DuckDBPyType, form: Form) -> str:
    """SQL expression of a column in a form."""
    if form == "table":
        return column if _id(kind) in _FLOATS else f"{column}::VARCHAR"
    if form == "json":
        return f"to_json({column})::VARCHAR"
    return column if form == "parquet" or _id(kind) in _PLAIN else f"{column}::VARCHAR"


def _id(kind: DuckDBPyType) -> str:
    return str(kind.id).lower()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
