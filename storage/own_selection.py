"""The user's own SQL selects the start groups of a step instead of the seeded selection (`storage.selection`).

It runs in the trainer's index and may read every table, above all `candidates` of `select_batch.sql`; it is trusted and
unrestricted. The last statement returns `shard` and `start_group` in descending priority. The step takes the first ones, each
with all its eligible advantage groups, so the SQL cannot break lag, uses or whole groups. A result that breaks a rule stops
the step with one sentence, without a fallback.
"""

import duckdb
import pyarrow as pa

from entente.telemetry.errors import InputError


def ask_for_start_groups(connection: duckdb.DuckDBPyConnection, selection: str) -> pa.Table:
    """Rows of the view `wanted`: the candidates that the SQL returns, and their place in its order, from 1. Raises InputError
    if the SQL fails, or returns other columns, a non-candidate, or a duplicate."""
    candidates = connection.sql("FROM candidates").to_arrow_table()
    try:
        answer = connection.sql(selection)
        columns = [] if answer is None else answer.columns
        if answer is None or sorted(columns) != ["shard", "start_group"]:
            raise InputError(
                f"storage.selection returns {', '.join(columns) or 'no rows'}: end it with a SELECT of shard and start_group "
                "alone, because start groups are taken whole"
            )
        chosen = answer.project("shard::VARCHAR, start_group::VARCHAR").fetchall()
    except duckdb.Error as error:
        sentence = str(error).splitlines()[0].rstrip("!")
        raise InputError(
            f"storage.selection failed: {sentence}; `candidates` has {', '.join(candidates.column_names)}"
        ) from error
    keys = zip(candidates["shard"].to_pylist(), map(str, candidates["start_group"].to_pylist()), strict=True)
    left = {key: place for place, key in enumerate(keys)}
    places = []
    for key in chosen:
        if key not in left:
            raise InputError(
                f"storage.selection returns start group {key[1]} of shard {key[0]} twice, or although the step cannot train on "
                "it: take each from `candidates` once"
            )
        places.append(left.pop(key))
    wanted = candidates.select(["shard", "start_group", "advantage_groups"]).take(pa.array(places, pa.int64()))
    return wanted.append_column("place", pa.array(range(1, len(places) + 1), pa.int64()))
