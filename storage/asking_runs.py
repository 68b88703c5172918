"""SQL queries over several runs at once: the views of `storage.asking`, each with the run's name in front.

The tables and views of a run are in a schema of their own of one database, so that nothing joins rows of two runs unasked: ids of
decisions are the same in runs of equal numbers. A ready question is asked of each run on its own.
"""

from collections.abc import Sequence

import duckdb

from storage.asking import VIEWS, AskedRun, close_doors, make_views, ready_query


def connect_runs(
    runs: Sequence[AskedRun], *, as_of: int | None = None, memory_gib: float | None = None
) -> duckdb.DuckDBPyConnection:
    """A connection with the views of `VIEWS` over all the runs, whose first column is `run`, the run's name.

    Args:
        as_of, memory_gib: see `asking.connect`.

    Raises:
        InputError: a folder is no run, or a run has no such step.
    """
    connection = duckdb.connect(":memory:")
    for number, run in enumerate(runs):
        connection.execute(f"CREATE SCHEMA {_schema(number)}")
        connection.execute(f"USE memory.{_schema(number)}")
        make_views(run, as_of, connection, f"_{number}")
    connection.execute("USE memory.main")
    for view in VIEWS:
        connection.execute(f'CREATE VIEW "{view}" AS {_stack_runs(runs, view)}')
    close_doors(connection, memory_gib)
    return connection


def _schema(number: int) -> str:
    """Schema of the run of this number, from 0."""
    return f"run_{number}"


def ready_query_of_runs(connection: duckdb.DuckDBPyConnection, runs: Sequence[AskedRun], name: str) -> str:
    """The SQL that asks a ready question of each run on its own, and puts the run's name before each answer.

    Raises:
        InputError: there is no query of that name.
    """
    question, view = ready_query(name), f"@{name}"
    for number in range(len(runs)):
        connection.execute(f"USE memory.{_schema(number)}")
        connection.execute(f'CREATE OR REPLACE VIEW "{view}" AS {question}')
    connection.execute("USE memory.main")
    return _stack_runs(runs, view)


def _stack_runs(runs: Sequence[AskedRun], view: str) -> str:
    names = (run.folder.name.replace("'", "''") for run in runs)
    return " UNION ALL BY NAME ".join(
        f"SELECT '{name}' AS run, * FROM {_schema(number)}.\"{view}\"" for number, name in enumerate(names)
    )
