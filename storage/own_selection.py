"""A user's query chooses the start groups of a step, within rules that it cannot change (`storage.selection`).

The query is one SELECT over the table `candidates` (`candidates.sql`): the start groups with an advantage group that the step
can train on. It returns their `shard` and `start_group` in the order in which they are wanted. The step takes them, each with
all its eligible advantage groups, until it has enough. So it cannot change lag, uses or whole groups.

It runs in a database of its own, in memory, with this table alone: without files, network, settings or Python's variables, for
`SECONDS` at most. It calls nothing that varies, so that the same rows give the same answer. One that breaks a rule ends the step
with one sentence; nothing is trained on instead.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import pyarrow as pa

from entente.telemetry.errors import InputError

THREAD = "entente-question"
_Found = TypeVar("_Found")
SECONDS = 10.0
"""Time limit of a query. One over ten thousand rows takes milliseconds."""
_MEMORY_MIB = 1024
_SQL = Path(__file__).with_name("candidates.sql").read_text()
Key = tuple[str, int]
"""Shard and number of a start group."""


def list_candidates(connection: duckdb.DuckDBPyConnection, query: Mapping[str, Any]) -> pa.Table:
    """The start groups that the step can train on, from the table `standings` of an index.

    Args:
        query: the values of a `SelectionQuery` by name.
    """
    (statement,) = connection.extract_statements(_SQL)
    found = connection.sql(statement.query, params={name: query[name] for name in statement.named_parameters})
    return found.to_arrow_table().combine_chunks()


def order_candidates(connection: duckdb.DuckDBPyConnection, query: Mapping[str, Any]) -> pa.Table:
    """The candidates that the query of the step returns, in its order."""
    candidates = list_candidates(connection, query)
    place_of = {key: place for place, key in enumerate(keys_of(candidates))}
    places: dict[int, None] = {}
    for key in _answer(query["selection"], candidates):
        shard, start_group = key
        if (place := place_of.get(key)) is None:
            why = _standing(connection, key)
            known = f"which a step cannot train on: it is {why}" if why else "which is no start group that a step can choose"
            raise InputError(
                f"storage.selection returns start group {start_group} of shard {shard}, {known}; take `candidates` alone"
            )
        if place in places:
            raise InputError(f"storage.selection returns start group {start_group} of shard {shard} twice: return each once")
        places[place] = None
    return candidates.take(pa.array(list(places), pa.int64()))


def keys_of(rows: pa.Table) -> list[Key]:
    """Shard and start group of each row."""
    return list(zip(rows["shard"].to_pylist(), rows["start_group"].to_pylist(), strict=True))


def _standing(connection: duckdb.DuckDBPyConnection, key: Key) -> str:
    """Standings of the advantage groups of a start group, as 'used' or 'expired and used'; empty if it is unknown."""
    shard, start_group = map(str, key)
    found = connection.execute(
        "SELECT DISTINCT standing FROM standings WHERE shard = ? AND start_group::VARCHAR = ? ORDER BY ALL", [shard, start_group]
    )
    return " and ".join(standing for (standing,) in found.fetchall())


def _answer(query: str, candidates: pa.Table) -> list[Key]:
    """What the query returns, in its order; at most one more than there are candidates."""

    def ask(connection: duckdb.DuckDBPyConnection) -> list[Key]:
        try:
            statements = connection.extract_statements(query)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise InputError("storage.selection must be one SELECT over `candidates`, and nothing else")
            _check_calls(connection, statements[0].query)
            found = connection.sql(statements[0].query)
            if sorted(found.columns) != ["shard", "start_group"]:
                raise InputError(
                    f"storage.selection returns {', '.join(found.columns)}: return shard and start_group alone, because start "
                    "groups are taken whole"
                )
            return found.limit(candidates.num_rows + 1).project("shard, start_group").fetchall()
        except duckdb.Error as error:
            there = ", ".join(candidates.column_names)
            sentence = str(error).splitlines()[0].rstrip("!")
            raise InputError(f"storage.selection failed: {sentence}; `candidates` has {there}") from error

    with _closed_database(candidates) as connection:
        late = f"storage.selection was ended after {SECONDS:g} seconds: let the query do less"
        return run_interruptible(connection, ask, seconds=SECONDS, late=late)


def _check_calls(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """Refuse samples, and functions of which DuckDB says that the same arguments may give another result."""
    varying = "SELECT function_name FROM duckdb_functions() WHERE stability <> 'CONSISTENT'"
    names = {"ago", *(name for (name,) in connection.execute(varying).fetchall())}  # the macro ago calls now
    ((tree,),) = connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [query]).fetchall()
    for node in _nodes(json.loads(tree)):
        called = str(node.get("function_name", "")).lower()
        columns = [str(name).lower() for name in node.get("column_names") or []]
        if len(columns) == 1 and columns[0].startswith(("current_", "local")):  # such as current_date, called without brackets
            called = columns[0]
            names.add(called)
        if called in names or node.get("sample"):
            what = f"calls {called}, whose result" if called in names else "takes a sample, which"
            raise InputError(f"storage.selection {what} changes: draw with the column uniform, which stays the same for a row")


def _nodes(tree: Any) -> Iterator[Mapping[str, Any]]:
    """All objects in a JSON value."""
    if isinstance(tree, Mapping):
        yield tree
    for inner in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ():
        yield from _nodes(inner)


@contextmanager
def _closed_database(candidates: pa.Table) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database in memory with this table alone."""
    with duckdb.connect(":memory:", config={"threads": 1, "memory_limit": f"{_MEMORY_MIB}MiB"}) as connection:
        connection.register("given", candidates)
        connection.execute("CREATE TABLE candidates AS FROM given")
        connection.unregister("given")
        for assignment in ("python_enable_replacements = false", "temp_directory = ''", "enable_progress_bar = false"):
            connection.execute(f"SET {assignment}")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
        yield connection


def run_interruptible(
    connection: duckdb.DuckDBPyConnection, work: Callable[[duckdb.DuckDBPyConnection], _Found], *, seconds: float, late: str
) -> _Found:
    """The result of `work`, which asks the connection, and which a signal, Ctrl-C or a time limit can end.

    DuckDB runs in C, and Python handles no signal meanwhile. So the query runs in a thread, and the caller's thread waits where
    signal handlers run. An exception there interrupts the query.

    Raises:
        InputError: it takes longer than `seconds`; the sentence is `late`.
        Exception: what the work, or a signal handler, raised.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
    answer = pool.submit(work, connection)
    try:
        return answer.result(timeout=seconds)
    except TimeoutError as error:
        raise error if answer.done() else InputError(late) from None
    finally:
        while not answer.done():  # an interrupt before the query has begun has no effect
            connection.interrupt()
            wait([answer], timeout=0.05)
        pool.shutdown()
