"""`entente sql`: ask the trajectory store."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table


def sql(
    query: Annotated[str, Parameter(help="One SQL statement over the views below.")],
    *,
    run: Annotated[str, Parameter(help="Name of the run.")],
    runs_root: Annotated[Path, Parameter(help="Folder of all runs.")] = Path("runs"),
) -> None:
    """Ask a run's rows with DuckDB's SQL, also while it trains; nothing is locked and nothing can be changed.

    Views: decisions (a row each), groups (advantage groups), batches (what each step trained on), plies, refused.

    Examples

        entente sql --run mine "select policy_version, count(*), avg(centres_gained) from decisions group by all order by all"

        entente sql --run mine "select power, phase, \\"return\\" from decisions order by \\"return\\" desc limit 5"

        entente sql --run mine "select step, count(*), avg(policy_lag) from batches group by all order by all"
    """
    import duckdb

    from flows.run_settings import settings_of
    from storage.index import connect
    from storage.runs import RunPaths
    from telemetry.errors import InputError

    # The run's own blend, so that "return" is what the trainer saw.
    storage = settings_of(RunPaths(runs_root / run)).storage
    with connect(runs_root / run, blend=storage.blend, discount=storage.discount) as connection:
        try:
            result = connection.sql(query)
            if result is None:
                raise InputError("the statement gives no rows; ask with SELECT")
            names, rows = result.columns, result.fetchall()
        except duckdb.Error as error:
            raise InputError(f"SQL failed: {' '.join(str(error).split())}") from error
    table = Table(*names)
    for row in rows:
        table.add_row(*("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
    Console(width=None if Console().is_terminal else 200).print(table)
