"""The ends of forks: what a value head foretells for a decision, computed from the stored rows.

    end = figure of the power in the decision's position + changes over this and its later decisions of the fork

The figures are the power's share of squared centres, and its centres divided by `CENTRES_SCALE`. The changes are reward
components, so a fork that ended with a solo counts too, though no ply holds its last position. Equal rows have equal bits.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from game.scores import Standing
from game.snapshot import POWERS, centres_in
from records.value_head import CENTRES_SCALE
from storage.facts import with_constants
from storage.returns import returns_of
from storage.schema import FINAL, as_array

_PLACE = ["start_group", "fork", "ply"]


def ends_of(
    rows: pa.Table, open_decisions: Callable[[str], pa.Table], open_plies: Callable[[str], pa.Table]
) -> npt.NDArray[np.float32]:
    """Ends [rows, 2] of the rows of a selection or a ledger.

    Args:
        open_decisions, open_plies: open the decisions and the plies of a shard by its name; whatever they raise is raised.
    """
    shards, numbers = np.array(rows["shard"].to_pylist(), object), as_array(rows["row"]).to_numpy()
    ends = np.empty((len(shards), 2))
    for shard in dict.fromkeys(shards.tolist()):
        (here,) = (shards == shard).nonzero()
        ends[here] = _ends_in(open_decisions(shard), open_plies(shard), numbers[here])
    return ends.astype(np.float32)


def sequences_of(rows: pa.Table) -> npt.NDArray[np.int64]:
    """For each row of a selection or a ledger [rows, 2]: a number that its fork and power alone have, and its ply."""
    named = zip(*(rows[name].to_pylist() for name in ("shard", "start_group", "fork", "power")), strict=True)
    numbers: dict[tuple[str, int, int, str], int] = {}
    found = [numbers.setdefault(name, len(numbers)) for name in named]
    return np.column_stack([np.array(found, np.int64), as_array(rows["ply"]).to_numpy().astype(np.int64)])


def _ends_in(decisions: pa.Table, plies: pa.Table, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Ends [rows, 2] of these rows of one shard."""
    power = decisions.schema.get_field_index("power")
    named = with_constants(decisions.set_column(power, "power", decisions["power"].cast(pa.string())), shard="")
    squares, centres = (returns_of(named, {FINAL + name: 1.0}, 0.0)[rows] for name in ("sos_share", "centres_gained"))
    positions = dict(zip(_places(plies), plies["position"].to_pylist(), strict=True))
    standings: dict[tuple[int, int, int], Standing] = {}
    found = []
    chosen = named.take(pa.array(rows))
    for place, power, *changes in zip(_places(chosen), chosen["power"].to_pylist(), squares, centres, strict=True):
        if place not in standings:  # the powers of a position share it
            standings[place] = Standing(centres=centres_in(positions[place]))
        now = standings[place]
        found.append((now.sos_share(power) + changes[0], (now.centres[POWERS.index(power)] + changes[1]) / CENTRES_SCALE))
    return np.array(found)


def _places(table: pa.Table) -> list[tuple[int, int, int]]:
    """Start group, fork and ply of each row."""
    return list(zip(*(table[name].to_pylist() for name in _PLACE), strict=True))
