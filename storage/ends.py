"""The ends of forks: what a value head foretells for a decision, computed from the stored rows.

    end = figure of the power in the decision's position + changes over this and its later decisions of the fork

The figures are the power's share of squared centres, and its centres divided by `CENTRES_SCALE`. The changes are reward
components, so a fork that ended with a solo counts too, though no ply holds its last position. Equal rows have equal bits.
"""

from collections.abc import Callable

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from game.scores import Standing
from game.snapshot import POWERS, centres_in
from storage.facts import numbered
from storage.mapped import ShardDamaged
from storage.value_heads import CENTRES_SCALE
from telemetry.errors import DataError

_CHANGES = """
SELECT p."row", sum(d.sos_share::DOUBLE ORDER BY d.ply), sum(d.centres_gained::DOUBLE ORDER BY d.ply)
FROM ends_wanted AS w
JOIN plies AS p ON (p.shard, p.start_group, p.fork, p.ply) = (w.shard, w.start_group, w.fork, w.ply)
JOIN decisions AS d ON (d.shard, d.start_group, d.fork, d.power) = (w.shard, w.start_group, w.fork, w.power) AND d.ply >= w.ply
GROUP BY w.place, p."row" ORDER BY w.place
"""


def ends_of(
    connection: duckdb.DuckDBPyConnection, rows: pa.Table, open_plies_of: Callable[[str], pa.Table]
) -> npt.NDArray[np.float32]:
    """Ends [rows, 2] of the rows of a selection or a ledger.

    Args:
        connection: the tables of an index that has read the rows' shards.
        open_plies_of: opens the plies of a shard by its name.

    Raises:
        ShardDamaged: the plies of a row are missing or damaged.
    """
    shards, powers = rows["shard"].to_pylist(), rows["power"].to_pylist()
    connection.register("ends_wanted", numbered(rows.select(["shard", "start_group", "fork", "ply", "power"]), "place"))
    found = connection.execute(_CHANGES).fetchall()
    connection.unregister("ends_wanted")
    if len(found) != len(shards):
        raise ShardDamaged(f"Shard {shards[0]} or another one of its step lacks plies; restore the run's shards.", shards[0])
    positions: dict[str, pa.ChunkedArray] = {}
    for shard in dict.fromkeys(shards):
        try:
            positions[shard] = open_plies_of(shard)["position"]
        except DataError as error:
            raise ShardDamaged(str(error), shard) from error
    standings: dict[tuple[str, int], Standing] = {}
    ends = np.empty((len(shards), 2))
    for place, (shard, power, (ply, squares, centres)) in enumerate(zip(shards, powers, found, strict=True)):
        if (shard, ply) not in standings:  # the powers of a position share it
            standings[shard, ply] = Standing(centres=centres_in(positions[shard][ply].as_py()))
        now = standings[shard, ply]
        ends[place] = now.sos_share(power) + squares, (now.centres[POWERS.index(power)] + centres) / CENTRES_SCALE
    return ends.astype(np.float32)
