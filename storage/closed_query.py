"""Runs the query of `storage.selection` over the table `candidates`, so that the same rows give the same answer.

The query is one SELECT. It runs in a database of its own, in memory, with this table alone: without files, network, settings or
Python's variables, for `SECONDS` at most. What it calls must depend on its arguments alone.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import duckdb
import pyarrow as pa

from storage.interruptible import run_interruptible
from telemetry.errors import InputError

SECONDS = 10.0
"""Time limit of a query. One over ten thousand rows takes milliseconds."""
MEMORY_MIB = 1024
_TABLE_FUNCTIONS = {"generate_series", "range", "unnest"}
VARYING = frozenset({
    "ago", "current_connection_id", "current_database", "current_date", "current_localtime", "current_localtimestamp",
    "current_query", "current_query_id", "current_schema", "current_schemas", "current_setting", "current_time",
    "current_timestamp", "current_transaction_id", "currval", "error", "gen_random_uuid", "get_current_time",
    "get_current_timestamp", "getvariable", "in_search_path", "localtime", "localtimestamp", "nextval", "now", "random",
    "setseed", "setval", "sleep_ms", "stats", "today", "transaction_timestamp", "txid_current", "uuid", "uuidv4",
    "uuidv7", "vector_type", "write_log",
})  # fmt: skip
"""Functions whose result does not follow from their arguments. A test compares them with DuckDB's own list."""


def ask_closed(query: str, candidates: pa.Table) -> list[tuple[str, int]]:
    """Shard and number of the start groups that the query returns, in its order; at most one more than there are candidates.

    Raises:
        InputError: the query is not one SELECT, draws or asks for the time, takes other tables, returns other columns, fails, or
            takes longer than `SECONDS`.
    """
    return run_interruptible(
        partial(_closed_database, candidates),
        partial(_ask, query=query, candidates=candidates),
        seconds=SECONDS,
        cannot_end=lambda error: None,
        late=f"storage.selection was ended after {SECONDS:g} seconds: let the query do less",
    )


@contextmanager
def _closed_database(candidates: pa.Table) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database in memory with this table alone."""
    with duckdb.connect(":memory:", config={"threads": 1, "memory_limit": f"{MEMORY_MIB}MiB"}) as connection:
        connection.register("given", candidates)
        connection.execute("CREATE TABLE candidates AS FROM given")
        connection.unregister("given")
        for assignment in ("python_enable_replacements = false", "temp_directory = ''", "enable_progress_bar = false"):
            connection.execute(f"SET {assignment}")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        yield connection


def _ask(connection: duckdb.DuckDBPyConnection, *, query: str, candidates: pa.Table) -> list[tuple[str, int]]:
    try:
        statements = connection.extract_statements(query)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise InputError("storage.selection must be one SELECT over `candidates`, and nothing else")
        _check_calls(connection, statements[0].query)
        found = connection.sql(statements[0].query)
        if sorted(found.columns) != ["shard", "start_group"]:
            raise InputError(
                f"storage.selection returns {', '.join(found.columns)}: return shard and start_group alone, because start groups "
                "are taken whole"
            )
        return found.limit(candidates.num_rows + 1).project("shard, start_group").fetchall()
    except duckdb.Error as error:
        there = ", ".join(candidates.column_names)
        sentence = str(error).splitlines()[0].rstrip("!")
        raise InputError(f"storage.selection failed: {sentence}; `candidates` has {there}") from error


def _check_calls(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """Check that the result follows from the table alone.

    Raises:
        InputError: the query draws, asks for the time, or calls a function that makes a table.
    """
    ((text,),) = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [query]).fetchall()
    for node in _nodes(json.loads(text)):
        names = node.get("column_names") or []
        if node.get("type") == "TABLE_FUNCTION" and (called := node["function"]["function_name"]) not in _TABLE_FUNCTIONS:
            raise InputError(f"storage.selection calls {called}, which makes a table: a query takes `candidates` alone")
        called = str(node.get("function_name", "")).lower()
        if len(names) == 1 and (word := str(names[0]).lower()).startswith(("current_", "local")):  # called without brackets
            called = word
        if called in VARYING:
            raise InputError(
                f"storage.selection calls {called}, whose result changes: draw with the column uniform, so that the same rows "
                "give the same choice"
            )
        if node.get("sample"):
            raise InputError("storage.selection takes a sample, which changes: draw with the column uniform instead")


def _nodes(tree: Any) -> Iterator[Mapping[str, Any]]:
    """All objects in a JSON value."""
    if isinstance(tree, Mapping):
        yield tree
    for inner in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ():
        yield from _nodes(inner)
