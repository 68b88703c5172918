"""`entente sql`: ask the trajectory store."""

import io
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import pyarrow as pa
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from telemetry.errors import InputError

Format = Literal["table", "csv", "json", "parquet"]


def sql(
    query: Annotated[str, Parameter(help="One SELECT over the views below; @NAME for a ready question, @ for their list.")],
    *,
    run: Annotated[str, Parameter(help="Name of the run.")],
    runs_root: Annotated[Path, Parameter(help="Folder of all runs.")] = Path("runs"),
    as_of: Annotated[int | None, Parameter(help="A step: show the run as it was when its rows were chosen.")] = None,
    format: Annotated[Format, Parameter(help="How the answer is given; json: one object a line.")] = "table",
    output: Annotated[Path | None, Parameter(help="File to write the answer to; parquet needs one.")] = None,
) -> None:
    """Ask a run's rows with DuckDB's SQL, also while it trains; nothing is locked and nothing can be changed.

    Views: decisions (a row each), groups (advantage groups), batches (what each step trained on; trained: without what a fork
    left behind), plies, orders, tokens (a row per completion position), lag, snapshots, standings (which groups the next step
    could train on), metrics (step, name, value), workers, worker_log, devices (its GPUs),
    refused.

    Examples

        entente sql --run mine "select policy_version, count(*), avg(centres_gained) from decisions group by all order by all"

        entente sql --run mine @return_by_version_and_power

        entente sql --run mine --as-of 12 "select standing, count(*) from standings group by all"

        entente sql --run mine "from tokens where not forced" --format parquet --output tokens.parquet
    """
    from pipeline.run_settings import settings_at, settings_of
    from storage.asking import QUERIES, ask, connect, ready
    from storage.runs import RunPaths

    if query == "@":
        return _show([{"ready question": f"@{name}", "answers": _answers(text)} for name, text in QUERIES.items()])
    if (format == "parquet" and output is None) or (format == "table" and output is not None):
        raise InputError("--output takes an answer as --format csv, json or parquet, and parquet needs it")
    question = ready(query[1:]) if query.startswith("@") else query
    # The run's own blend, so that "return" is what the trainer saw.
    paths = RunPaths(runs_root / run)
    storage = (settings_of(paths) if as_of is None else settings_at(paths, as_of)).storage
    with connect(paths.root, blend=storage.blend, discount=storage.discount, as_of=as_of) as connection:
        answer = ask(connection, question)
    if format == "table" and output is None:
        _show(answer.to_pylist(), answer.column_names)
    else:
        _write(answer, format, output)


def _answers(text: str) -> str:
    return text.splitlines()[0].removeprefix("-- ")


def _show(rows: list[dict[str, object]], names: list[str] | None = None) -> None:
    table = Table(*(names or list(rows[0])))
    for row in rows:
        table.add_row(
            *(
                "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
                for value in (row[name] for name in (names or row))
            )
        )
    Console(width=None if Console().is_terminal else 200).print(table, markup=False)


def _flat(answer: pa.Table) -> pa.Table:
    """The answer with its lists as text: CSV has no other way to hold them."""
    for place, field in enumerate(answer.schema):
        if pa.types.is_nested(field.type):
            texts = [None if value is None else json.dumps(value) for value in answer[field.name].to_pylist()]
            answer = answer.set_column(place, field.name, pa.array(texts, pa.string()))
    return answer


def _write(answer: pa.Table, format: Format, output: Path | None) -> None:
    import pyarrow.csv
    import pyarrow.parquet

    sink = io.BytesIO()
    if format == "parquet":
        pyarrow.parquet.write_table(answer, sink)
    elif format == "json":
        for row in answer.to_pylist():
            sink.write(json.dumps(row, default=str).encode() + b"\n")
    else:
        pyarrow.csv.write_csv(_flat(answer), sink)
    if output is None:
        sys.stdout.write(sink.getvalue().decode())
        return
    try:
        output.write_bytes(sink.getvalue())
    except OSError as error:
        raise InputError(f"'{output}' cannot be written: {error.strerror}") from error
