"""SQL queries over a run: connections, named queries, and results in a given format, or one sentence.

The in-memory database cannot access files or the network, so it needs no lock, may be opened while the run writes, and changes
nothing. DuckDB itself converts to text what a table or CSV cannot hold, as its own client would.
"""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

import duckdb
import pyarrow as pa
from duckdb.sqltypes import DuckDBPyType

from entente.telemetry.errors import InputError
from storage.index import open_index
from storage.run_views import VIEWS, ReadThought, TokenText, make_views
from storage.runs import RunPaths
from storage.settings import StorageSettings

THREAD = "entente-question"
_Result = TypeVar("_Result")
Form = Literal["arrow", "table", "csv", "json", "parquet"]
_FLOATS = {"float", "double"}
_PLAIN = _FLOATS | {
    "boolean", "tinyint", "smallint", "integer", "bigint", "utinyint", "usmallint", "uinteger", "ubigint", "varchar",
}  # fmt: skip
"""Types that a CSV writer writes unchanged."""
_NOT_IN_PARQUET = {"uhugeint", "time with time zone", "bit", "bignum", "variant"}
"""Types whose values Arrow has otherwise: large numbers as negative ones, times without their zone, the others as bytes."""
_NESTED = {"list", "array", "struct", "map", "union"}

QUERIES = {file.stem: file.read_text() for file in sorted((Path(__file__).parent / "queries").glob("*.sql"))}
"""Named queries; the first line of each says what it answers."""
_NEAR = re.compile(r'^(?:Did you mean |Candidate bindings: :? ?)("[^"\n]+")', re.MULTILINE)
_EXPLAIN = re.compile(r"\s*EXPLAIN\b(\s+ANALYZE\b)?(\s*\([^()]*\))?", re.IGNORECASE)
"""With ANALYZE it runs what it explains."""
_FETCHED_ROWS = 10_000  # rows per record batch from DuckDB
GIB = 2**30


def connect(
    run_dir: Path,
    storage: StorageSettings | None = None,
    *,
    seed: int = 0,
    memory_gib: float | None = None,
    token_text: TokenText = lambda token: None,
    read_thought: ReadThought = lambda tokens: None,
) -> duckdb.DuckDBPyConnection:
    """A DuckDB connection with the views of `VIEWS` over the run as it is now.

    Args:
        storage: reward weights and discount of the column "return", and the rules of `group_eligibility`; None: the defaults.
        seed: of `uniform` in `candidates`.
        memory_gib: DuckDB's limit; None: its default, most of the machine's memory. Nothing spills to disk.
    """
    paths = RunPaths(Path(run_dir))
    if not paths.shards.is_dir():
        raise InputError(f"{run_dir} is not a run: it has no folder 'shards'; give a folder such as runs/<name>.")
    index = open_index(paths, storage, seed=seed, threads=0, keep_rows=True)
    make_views(index, paths, token_text, read_thought)
    connection = index.connection
    connection.execute("SET temp_directory = ''")
    if memory_gib is not None:
        connection.execute(f"SET memory_limit = '{round(memory_gib * GIB)}B'")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection


def ask(
    connection: duckdb.DuckDBPyConnection,
    question: str,
    form: Form = "arrow",
    *,
    first: int | None = None,
    memory_gib: float | None = None,
) -> pa.Table:
    """The result of one query, in columns that `form` can hold ("json": one column, each row an object).

    `first` stops after at least this many rows; `memory_gib` bounds the result. Raises InputError if it is not a single
    SELECT, DuckDB refuses it, or it takes too much memory; the message adds similar names and the views.
    """
    batches: list[pa.RecordBatch] = []
    try:
        with _convert(relation(connection, question), form).to_arrow_reader(_FETCHED_ROWS) as reader:
            schema, rows, size = reader.schema, 0, 0
            for batch in reader:
                batches.append(batch)
                rows, size = rows + batch.num_rows, size + batch.nbytes
                if first is not None and rows >= first:
                    break
                if memory_gib is not None and size > memory_gib * GIB:
                    raise InputError(
                        f"the result takes more than {memory_gib:g} GiB, after {rows:,} rows: ask for less, as with LIMIT, "
                        "or raise --memory-gib"
                    )
        return pa.Table.from_batches(batches, schema)
    except (duckdb.Error, pa.ArrowException, OSError) as error:  # errors while rows are fetched come through Arrow
        raise InputError(_refusal(str(error).strip())) from error


def relation(connection: duckdb.DuckDBPyConnection, question: str) -> duckdb.DuckDBPyRelation:
    try:
        explained = question[match.end() :] if (match := _EXPLAIN.match(question)) else question
        if [each.type for each in connection.extract_statements(explained)] != [duckdb.StatementType.SELECT]:
            raise InputError("ask one question with SELECT: a run cannot be changed here")
        with suppress(duckdb.Error):
            connection.execute("ROLLBACK")  # of a question that was interrupted
        # WITH may change tables in a SELECT. DuckDB runs such a one here, and others when their rows are fetched.
        connection.execute("BEGIN TRANSACTION READ ONLY")
        try:
            return connection.sql(question)
        finally:
            connection.execute("ROLLBACK")
    except duckdb.Error as error:
        raise InputError(_refusal(str(error).strip())) from error


def run_interruptible(
    connection: duckdb.DuckDBPyConnection, work: Callable[[duckdb.DuckDBPyConnection], _Result], *, seconds: float, late: str
) -> _Result:
    """Run `work` so that a signal, Ctrl-C or the limit of `seconds` (InputError with the message `late`) can stop it.

    DuckDB runs in C, where Python handles no signal. So the query runs in a thread, and the caller waits where signal handlers
    run; an exception there interrupts the query.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
    answer = pool.submit(work, connection)
    try:
        return answer.result(timeout=seconds)
    except TimeoutError as error:
        raise error if answer.done() else InputError(late) from None
    finally:
        while not answer.done():  # an interrupt before the query starts has no effect
            connection.interrupt()
            wait([answer], timeout=0.05)
        pool.shutdown()


def _convert(answer: duckdb.DuckDBPyRelation, form: Form) -> duckdb.DuckDBPyRelation:
    """Converts columns to types that `form` can hold; files get unique column names."""
    if form == "arrow":
        return answer
    if form != "table":
        row = "answer" + "_" * max(map(len, answer.columns))  # no column's name, which would come before the row's
        answer = answer.set_alias(row).project(f"to_json({row})::VARCHAR AS json" if form == "json" else "*")
    kept = _FLOATS if form == "table" else _PLAIN
    columns = []
    for place, (name, kind) in enumerate(zip(answer.columns, answer.types, strict=True), start=1):
        is_kept = not _is_lost_in_parquet(kind) if form == "parquet" else str(kind.id).lower() in kept
        cast = "" if is_kept else "::VARCHAR"
        quoted = name.replace('"', '""')
        columns.append(f'#{place}{cast} AS "{quoted}"')
    return answer.project(", ".join(columns))


def _is_lost_in_parquet(kind: DuckDBPyType) -> bool:
    """Also if a list or another nested type holds such values."""
    name = str(kind.id).lower()
    inner = [each for _, each in kind.children] if name in _NESTED else []  # of an array also its size
    return name in _NOT_IN_PARQUET or any(isinstance(each, DuckDBPyType) and _is_lost_in_parquet(each) for each in inner)


def json_lines(answer: pa.Table) -> Iterator[str]:
    """Rows of a result in the form "json" as strict ASCII JSON: NaN and infinities become null."""
    for text in answer["json"].to_pylist():
        if "NaN" in text or "Infinity" in text or not text.isascii():
            yield json.dumps(json.loads(text, parse_constant=lambda _: None), separators=(",", ":"))
        else:
            yield text.replace("\x7f", "\\u007f")


def _refusal(message: str) -> str:
    first_line = message.splitlines()[0]
    if first_line.startswith("Out of Memory"):
        return f"SQL failed: {first_line}; ask for less, or raise --memory-gib"
    near = f"; did you mean {match[1]}?" if (match := _NEAR.search(message)) else ""
    return f"SQL failed: {first_line}{near}; the views are {', '.join(VIEWS)}"


def ready_query(name: str) -> str:
    """The SQL of a named query; raises InputError for an unknown name."""
    if name not in QUERIES:
        raise InputError(f"there is no ready question '{name}'; known: {', '.join(QUERIES)}")
    return QUERIES[name]


def left_out(connection: duckdb.DuckDBPyConnection) -> str:
    """One sentence on the files whose rows are missing from all views; empty if there are none."""
    refused = connection.sql("SELECT shard, reason FROM rejected_files ORDER BY ALL").fetchall()
    if not refused:
        return ""
    first, why = refused[0]
    return f"the answer lacks rows of {len(refused)} damaged or missing files, first {first}: {why} (all: view rejected_files)"
