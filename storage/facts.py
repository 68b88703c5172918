"""The facts of a shard, which the index stores: scalar values, the place of each row, and three token counts.

Lists and the JSON of plies stay in the mapped files; the columns `shard` and `row` point to them.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from records.rows import Ply
from storage.schema import DECISION_SCHEMA, as_array, to_table

_DECISION_FACTS = [f.name for f in DECISION_SCHEMA if not pa.types.is_list(f.type) and f.name != "prompt_len"]
_PLY_FACTS = ["start_group", "fork", "ply", "phase", "snapshot_id"]


def decision_facts(decisions: pa.Table, producer: str, shard: str) -> pa.Table:
    """One row per decision; `n_branching` counts the positions where more than one token was legal."""
    facts = decisions.select(_DECISION_FACTS).replace_schema_metadata(None)
    # The dictionaries of shards differ, and one insert takes many shards.
    place = facts.schema.get_field_index("power")
    facts = facts.set_column(place, "power", facts["power"].cast(pa.string()))
    n_prompt = as_array(decisions["prompt_len"]).to_numpy()
    n_tokens = np.diff(as_array(decisions["input_ids"]).offsets.to_numpy())
    counts = {"n_prompt": n_prompt, "n_completion": n_tokens - n_prompt, "n_branching": _branching(decisions)}
    for name, values in counts.items():
        facts = facts.append_column(name, pa.array(values, pa.int32()))
    return _located(facts, producer, shard)


def ply_facts(plies: pa.Table, producer: str, shard: str) -> pa.Table:
    """One row per ply, without its JSON; `shard` names the shard of the decisions (see `shards.open_plies`)."""
    return _located(plies.select(_PLY_FACTS).replace_schema_metadata(None), producer, shard)


def with_constants(table: pa.Table, **constants: str | int) -> pa.Table:
    """The table with constant columns in front."""
    for place, (name, value) in enumerate(constants.items()):
        kind = pa.string() if isinstance(value, str) else pa.int32()
        table = table.add_column(place, name, pa.repeat(pa.scalar(value, kind), table.num_rows))
    return table


def numbered(table: pa.Table, name: str) -> pa.Table:
    """The table with the row number, from 0, as a column in front."""
    return table.add_column(0, name, pa.array(np.arange(table.num_rows, dtype=np.int32)))


def _located(table: pa.Table, producer: str, shard: str) -> pa.Table:
    return with_constants(numbered(table, "row"), shard=shard, producer=producer)


def _branching(decisions: pa.Table) -> npt.NDArray[np.int32]:
    bounds = as_array(decisions["legal_offsets"])
    starts, values = bounds.offsets.to_numpy(), bounds.values.to_numpy()
    wide = np.zeros(len(values) + 1, np.int64)
    wide[1:-1] = np.diff(values) > 1
    total = np.cumsum(wide)
    # The first offset of a row follows the last one of another row: that difference is no position and is left out.
    counts: npt.NDArray[np.int32] = (total[starts[1:] - 1] - total[starts[:-1]]).astype(np.int32)
    return counts


DECISION_FACTS = decision_facts(to_table([]), "", "").schema
"""Columns of decision_facts()."""
PLY_FACTS = ply_facts(to_table([], Ply), "", "").schema
"""Columns of ply_facts()."""
