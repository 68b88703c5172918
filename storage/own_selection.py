"""A user's own SQL chooses the start groups of a step in place of the draw (`storage.selection`).

It runs in the database of the trainer's index and may read every table there, `candidates` of `select_batch.sql` above all.
Nothing limits it: it is trusted like any other code of the user's. The last statement returns `shard` and `start_group`, most
wanted first. The step takes the first ones, each with all its eligible advantage groups, so it cannot break lag, uses or whole
groups. An answer that breaks a rule ends the step with one sentence; nothing is trained on instead.
"""

import duckdb
import pyarrow as pa

from entente.telemetry.errors import InputError


def ask_for_start_groups(connection: duckdb.DuckDBPyConnection, selection: str) -> pa.Table:
    """What the view `wanted` has: the candidates that the SQL returns, and their place in its order, from 1.

    Raises:
        InputError: the SQL fails, or returns other columns, what is no candidate, or a candidate twice.
    """
    candidates = connection.sql("FROM candidates").to_arrow_table()
    try:
        answer = connection.sql(selection)
        columns = [] if answer is None else answer.columns
        if answer is None or sorted(columns) != ["shard", "start_group"]:
            raise InputError(
                f"storage.selection returns {', '.join(columns) or 'no rows'}: end it with a SELECT of shard and start_group "
                "alone, because start groups are taken whole"
            )
        found = answer.project("shard::VARCHAR, start_group::VARCHAR").fetchall()
    except duckdb.Error as error:
        sentence = str(error).splitlines()[0].rstrip("!")
        raise InputError(
            f"storage.selection failed: {sentence}; `candidates` has {', '.join(candidates.column_names)}"
        ) from error
    keys = zip(candidates["shard"].to_pylist(), map(str, candidates["start_group"].to_pylist()), strict=True)
    left = {key: place for place, key in enumerate(keys)}
    places = []
    for key in found:
        if key not in left:
            raise InputError(
                f"storage.selection returns start group {key[1]} of shard {key[0]} twice, or although the step cannot train on "
                "it: take each from `candidates` once"
            )
        places.append(left.pop(key))
    wanted = candidates.select(["shard", "start_group", "advantage_groups"]).take(pa.array(places, pa.int64()))
    return wanted.append_column("place", pa.array(range(1, len(places) + 1), pa.int64()))
