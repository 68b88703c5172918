"""The facts of shards, and the DuckDB tables that hold them beside what the ledgers recorded.

The facts of a shard are its scalar values, the place of each row, and three token counts. Lists and the JSON of plies stay in the
mapped files; the columns `shard` and `row` point to them. The columns of a table come from an empty instance of what is inserted,
so schema and tables always agree. The return of a decision depends on its start group only, so returns and advantage groups are
computed once, when the shard is added. This module touches no files and chooses no rows.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from entente.records.rows import Ply
from storage.ledger import ROWS_SCHEMA
from storage.rewards import returns_of
from storage.schema import DECISION_SCHEMA, as_array, to_table

_GROUPS_SQL = Path(__file__).with_name("advantage_groups.sql").read_text()
_TABLES = ("decisions", "advantage_groups", "plies", "batches")
_DECISION_FACTS = [f.name for f in DECISION_SCHEMA if not pa.types.is_list(f.type) and f.name != "prompt_len"]
_PLY_FACTS = ["start_group", "fork", "ply", "phase", "snapshot_id"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """What the tables hold of a verified shard."""

    decisions: pa.Table
    """Facts of its decisions, one row each."""
    plies: pa.Table
    """Facts of its plies, one row each."""


def facts_of(shard: str, producer: str, decisions: pa.Table, plies: pa.Table) -> ShardFacts:
    """The facts of the shard of this name."""
    few = plies.select(_PLY_FACTS).replace_schema_metadata(None)
    return ShardFacts(decisions=decision_facts(decisions, producer, shard), plies=_located(few, producer, shard))


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


def _branching(decisions: pa.Table) -> npt.NDArray[np.int32]:
    bounds = as_array(decisions["legal_offsets"])
    starts, values = bounds.offsets.to_numpy(), bounds.values.to_numpy()
    wide = np.zeros(len(values) + 1, np.int64)
    wide[1:-1] = np.diff(values) > 1
    total = np.cumsum(wide)
    # The first offset of a row follows the last one of another row: that difference is no position and is left out.
    counts: npt.NDArray[np.int32] = (total[starts[1:] - 1] - total[starts[:-1]]).astype(np.int32)
    return counts


def _located(table: pa.Table, producer: str, shard: str) -> pa.Table:
    return _with_constants(_numbered(table, "row"), shard=shard, producer=producer)


def _with_constants(table: pa.Table, **constants: str | int) -> pa.Table:
    """The table with constant columns in front."""
    for place, (name, value) in enumerate(constants.items()):
        kind = pa.string() if isinstance(value, str) else pa.int32()
        table = table.add_column(place, name, pa.repeat(pa.scalar(value, kind), table.num_rows))
    return table


def _numbered(table: pa.Table, name: str) -> pa.Table:
    """The table with the row number, from 0, as a column in front."""
    return table.add_column(0, name, pa.array(np.arange(table.num_rows, dtype=np.int32)))


NO_FACTS = facts_of("", "", to_table([]), to_table([], Ply))
"""The facts of an empty shard: their columns."""


def record_rows(step: int, rows: pa.Table) -> pa.Table:
    """Rows of a ledger with the columns of `batches`."""
    return _with_constants(_numbered(rows.replace_schema_metadata(None), "place"), step=step)


def valued(decisions: pa.Table, weights: Mapping[str, float], discount: float) -> pa.Table:
    """Facts of decisions with their returns; see `returns.returns_of`."""
    return decisions.append_column("return", pa.array(returns_of(decisions, weights, discount), pa.float64()))


class FactTables:
    """Tables `decisions`, `advantage_groups`, `plies`, `batches`, `refused`, and the view `groups`.

    Attributes:
        connection: for one thread at a time.
    """

    def __init__(self, weights: Mapping[str, float], discount: float, threads: int) -> None:
        """Create the empty tables.

        Args:
            weights: weight of each reward component; see `returns.returns_of`.
            discount: see `returns.returns_of`.
            threads: threads of DuckDB; 0: one per core.
        """
        self._weights, self._discount = weights, discount
        self.connection = duckdb.connect(":memory:")
        # In a notebook without ipywidgets DuckDB has no bar, and refuses to be told so.
        if self.connection.sql("SELECT current_setting('enable_progress_bar')").fetchall() != [(False,)]:
            self.connection.execute("SET enable_progress_bar = false")
        if threads:
            self.connection.execute(f"SET threads = {threads}")
        self._with(
            valued(NO_FACTS.decisions, weights, discount),
            "valued",
            "CREATE TABLE decisions AS FROM valued",
            f"CREATE TABLE advantage_groups AS {_GROUPS_SQL}",
        )
        refused = pa.schema({"shard": pa.string(), "sentence": pa.string()}).empty_table()
        tables = {"plies": NO_FACTS.plies, "batches": record_rows(0, ROWS_SCHEMA.empty_table()), "refused": refused}
        for table, rows in tables.items():
            self._with(rows, "arrow", f"CREATE TABLE {table} AS FROM arrow")
        self.connection.execute(_GROUPS_VIEW)

    def add_shards(self, shards: Sequence[ShardFacts]) -> None:
        """Add facts of shards, in one statement per table, because a statement costs more than its rows."""
        if not shards:
            return
        self._with(
            valued(pa.concat_tables([shard.decisions for shard in shards]), self._weights, self._discount),
            "valued",
            "INSERT INTO decisions BY NAME FROM valued",
            f"INSERT INTO advantage_groups BY NAME {_GROUPS_SQL}",
        )
        self._with(pa.concat_tables([shard.plies for shard in shards]), "arrow", "INSERT INTO plies BY NAME FROM arrow")

    def add_record(self, record: pa.Table) -> None:
        """Add rows of a ledger, as `record_rows` returns them."""
        self._with(record, "arrow", "INSERT INTO batches BY NAME FROM arrow")

    def drop(self, shards: Sequence[str]) -> None:
        """Take all rows of these shards out of the tables.

        The tables are made anew, because deleted rows would stay in memory; so it costs what the other shards take.
        """
        for table in _TABLES:
            rest = f"FROM {table} WHERE shard NOT IN (SELECT unnest(?::VARCHAR[]))"
            self.connection.execute(f"CREATE OR REPLACE TABLE {table} AS {rest}", [list(shards)])

    def drop_expired(self, shards: Sequence[str]) -> Counter[str]:
        """Take these shards out of the tables and out of `standings`.

        Returns:
            their advantage groups by standing; `expired_with_spread` are part of `expired`.
        """
        them = "WHERE shard IN (SELECT unnest(?::VARCHAR[]))"
        found: Counter[str] = Counter()
        query = f"SELECT standing, has_spread, count(*) FROM standings {them} GROUP BY ALL"
        for standing, has_spread, groups in self.connection.execute(query, [list(shards)]).fetchall():
            found[standing] += groups
            found["expired_with_spread"] += groups if standing == "expired" and has_spread else 0
        self.connection.execute(f"DELETE FROM standings {them}", [list(shards)])
        self.drop(shards)
        return found

    def refuse(self, name: str, sentence: str) -> None:
        """Record a shard that is set aside."""
        self.connection.execute("INSERT INTO refused VALUES (?, ?)", [name, sentence])

    def refused(self) -> list[tuple[str, str]]:
        """Names of what was set aside, each with the reason."""
        return self.connection.sql("SELECT shard, sentence FROM refused ORDER BY shard").fetchall()

    def _with(self, table: pa.Table, name: str, *statements: str) -> None:
        """Run the statements while `table` is registered as `name`."""
        self.connection.register(name, table)
        for statement in statements:
            self.connection.execute(statement)
        self.connection.unregister(name)


_GROUPS_VIEW = """
CREATE VIEW "groups" AS
SELECT g.*, (
    SELECT count(DISTINCT b.step) FROM batches AS b
    WHERE b.shard = g.shard AND b.start_group = g.start_group AND b.power = g.power AND b.phase = g.phase
) AS used
FROM advantage_groups AS g
"""
