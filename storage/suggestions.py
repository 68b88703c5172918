"""Suggestions for an unknown name in an SQL query."""

import difflib
import re
from collections.abc import Sequence

import duckdb

_UNKNOWN_VIEW = re.compile(r'Table with name "?(?P<name>[^\s"]+)"? does not exist|Referenced table "(?P<other>[^"]+)" not found')
_UNKNOWN_COLUMN = re.compile(r'Referenced column "(?P<name>[^"]+)" not found|does not have a column named "(?P<other>[^"]+)"')
_DUCKDB_SUGGESTION = re.compile(r'^Did you mean ("[^"\n]+")', re.MULTILINE)
_MAX_SUGGESTIONS, _MIN_SIMILARITY = 3, 0.65


def suggest_names(connection: duckdb.DuckDBPyConnection, question: str, message: str, views: Sequence[str]) -> str:
    """The end of the sentence about DuckDB's `message`: '; did you mean ...?', or the empty string."""
    if (unknown := _UNKNOWN_VIEW.search(message)) is not None:
        near = [f'"{view}"' for view in _near(unknown["name"] or unknown["other"], views)]
    elif (unknown := _UNKNOWN_COLUMN.search(message)) is not None:
        near = _columns(connection, question, unknown["name"] or unknown["other"], views)
    else:  # DuckDB suggests function names itself
        near = _DUCKDB_SUGGESTION.findall(message)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _columns(connection: duckdb.DuckDBPyConnection, question: str, name: str, views: Sequence[str]) -> list[str]:
    """Similar columns of the views that the query names; if there are none, of any view, with the view's name."""
    words = set(re.findall(r"\w+", question.lower()))
    columns: dict[str, list[str]] = {}
    for view, column in connection.sql(
        "SELECT table_name, column_name FROM duckdb_columns() WHERE schema_name = 'main'"
    ).fetchall():
        if view in views:
            columns.setdefault(column, []).append(view)
    asked = [column for column, those in columns.items() if words & set(those)]
    if near := _near(name, asked):
        return [f'"{column}"' for column in near]
    return [f'"{column}" of {columns[column][0]}' for column in _near(name, list(columns))]


def _near(name: str, known: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(name.lower(), known, n=_MAX_SUGGESTIONS, cutoff=_MIN_SIMILARITY)
