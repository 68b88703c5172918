"""`entente sql`: query a run's rows with SQL."""

import io
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

import pyarrow as pa
from cyclopts import Parameter, validators
from rich.table import Table

from entente.cli.options import Run, RunsRoot, which_run
from entente.cli.terminal import cell, output_console
from entente.telemetry.errors import InputError
from entente.telemetry.progress import shown
from storage.files import write_output
from storage.runs import LATEST, RunPaths

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


Format = Literal["table", "csv", "json", "parquet"]
_BY_SUFFIX: dict[str, Format] = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
_MAX_ROWS, _MAX_SEEN = 10_000, 100
"""Upper bounds of rows in a printed table, which is laid out as a whole, and in one on a terminal."""
_SECONDS, _MEMORY_GIB = 600.0, 2.0
"""Default limits. A query that needs more is usually a join without its condition."""
_AT_MOST = validators.Number(gt=0, lte=1_000_000)
"""Seconds or GiB beyond this would mean no limit, and overflow a counter of the system."""


def sql(
    query: Annotated[str, Parameter(help="One SELECT over the views above; @NAME for a ready-made query, @ to list them.")],
    *,
    run: Run = LATEST,
    runs_root: RunsRoot = Path("runs"),
    format: Annotated[
        Literal["table", "csv", "json"] | None,
        Parameter(help="Format of the result, without --output: table, csv, or json, one object per line."),
    ] = None,
    output: Annotated[Path | None, Parameter(help="File to write the result to, as .csv, .json or .parquet.")] = None,
    max_seconds: Annotated[float, Parameter(help="Time limit of the query, in seconds.", validator=_AT_MOST)] = _SECONDS,
    memory_gib: Annotated[
        float, Parameter(help="Memory limit of DuckDB in GiB; the result may take the same amount again.", validator=_AT_MOST)
    ] = _MEMORY_GIB,
) -> None:
    """Query a run's rows with DuckDB SQL, even while it trains. Takes no locks and changes nothing. Ctrl-C stops the query.

    Views: decisions (a row per decision), groups (advantage groups), batches (what each step trained on),
    phases, orders, tokens (a row per completion position, with its text), lag, snapshots, group_eligibility (which
    groups the next step could train on), candidates (its start groups), thoughts (the model's reasoning before its orders),
    metrics (step, name, value), devices (its GPUs), rejected_files.

    Examples

        entente sql --run mine "select policy_version, count(*), avg(centres_gained) from decisions group by all order by all"

        entente sql --run mine @return_by_version_and_power

        entente sql --run mine "from tokens where not forced" --output tokens.parquet
    """
    from entente.reports.run_text import connect_run
    from entente.settings.layers import settings_of
    from storage.run_sql import QUERIES, ask, left_out, ready_query, run_interruptible

    if query == "@":
        return _show(
            ["ready question", "answers"],
            ((f"@{name}", text.splitlines()[0].removeprefix("-- ")) for name, text in QUERIES.items()),
        )
    form = _form(format, output)
    question = ready_query(query[1:]) if query.startswith("@") else query
    most = _MAX_SEEN if sys.stdout.isatty() else _MAX_ROWS
    first = most + 1 if form == "table" else None

    def answered(connection: "DuckDBPyConnection") -> tuple[pa.Table, str]:
        return ask(connection, question, form, first=first, memory_gib=memory_gib), left_out(connection)

    paths = RunPaths(runs_root / which_run(run, runs_root))
    connection, text = connect_run(settings_of(paths), paths.root, memory_gib)
    late = f"the query exceeded {max_seconds:g} seconds: select less, or raise --max-seconds"
    with connection:
        answer, lacking = run_interruptible(connection, answered, seconds=max_seconds, late=late)
    if form == "table":
        _show(answer.column_names, _values(answer.slice(length=most)))
        if answer.num_rows > most:
            sys.stderr.write(f"only the first {most:,} rows are shown; --output answer.csv takes all\n")
    else:
        _write(answer, form, output)
        if output is not None:
            sys.stderr.write(f"rows written to {output}: {answer.num_rows:,}\n")
    if lacking:
        sys.stderr.write(f"{lacking}\n")
    if text.missing:
        sys.stderr.write(f'{text.missing}, so the column "text" is empty\n')


def _form(format: Format | None, output: Path | None) -> Format:
    if output is None:
        return format or "table"
    if format is not None:
        raise InputError("--format conflicts with --output, whose file extension sets the format: leave one of them out")
    if (suffix_format := _BY_SUFFIX.get(output.suffix.lower())) is None:
        raise InputError(f"--output writes csv, json or parquet: end '{output}' in one of these")
    return suffix_format


def _values(answer: pa.Table) -> Iterator[tuple[object, ...]]:
    columns = [column.to_pylist() for column in answer.columns]
    return zip(*columns, strict=True)


def _show(names: list[str], rows: Iterable[tuple[object, ...]]) -> None:
    keep = "\n" if names == ["explain_key", "explain_value"] else ""  # a query plan has several lines
    table = Table()
    for name in names:
        table.add_column(cell(name))
    for row in rows:
        texts = ("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value) for value in row)
        table.add_row(*(cell(text, keep=keep) for text in texts))
    output_console(200).print(table)


def _write(answer: pa.Table, form: Format, output: Path | None) -> None:
    if output is None:
        sink = io.BytesIO()
        _write_to(answer, form, sink)
        text = sink.getvalue().decode()
        sys.stdout.write(shown(text, keep="\n\t") if sys.stdout.isatty() else text)
        return
    try:
        write_output(output, lambda file: _write_to(answer, form, file))
    except pa.ArrowNotImplementedError as error:
        raise InputError(f"parquet cannot hold a column of the answer ({error}): cast it to text, as with ::VARCHAR") from error
    except OSError as error:
        raise InputError(f"'{output}' cannot be written: {error.strerror or error}") from error


def _write_to(answer: pa.Table, form: Format, file: BinaryIO) -> None:
    import pyarrow.csv
    import pyarrow.parquet

    from storage.run_sql import json_lines

    if form == "parquet":
        pyarrow.parquet.write_table(answer, file)
    elif form == "json":
        file.writelines(line.encode() + b"\n" for line in json_lines(answer))
    else:
        pyarrow.csv.write_csv(answer, file)
