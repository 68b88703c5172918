"""The tables of an index: an in-memory DuckDB with the facts of every row and ply, and what the ledgers recorded.

The columns of a table come from an empty instance of what is inserted, so schema and tables always agree. The return of a
decision depends on its start group only, so returns and advantage groups are computed once, when the shard is added. This
module touches no files and chooses no rows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import duckdb
import pyarrow as pa

from storage.facts import DECISION_FACTS, PLY_FACTS, numbered, with_constants
from storage.ledger import ROWS_SCHEMA
from storage.rewards import returns_of
from storage.schema import COMPONENTS, FINAL
from storage.settled import Settled
from storage.totals import Totals

GROUPS_SQL = Path(__file__).with_name("advantage_groups.sql").read_text()
_FATES = Path(__file__).with_name("fates.sql").read_text()
_START_GROUPS = Path(__file__).with_name("start_groups.sql").read_text()
_FACTS, _RECORDS = ("decisions", "advantage_groups", "plies"), ("used_groups", "batches")
_USED_GROUP = ["step", "shard", "start_group", "power", "phase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """What the index stores of verified shards."""

    decisions: pa.Table
    """Facts of their decisions."""
    plies: pa.Table
    """Facts of their plies."""


class FactTables:
    """Tables `decisions`, `advantage_groups`, `plies`, `batches`, `used_groups`, `refused`, and the view `groups`.

    On demand also `start_groups` (`start_groups.sql`), from which nothing is taken out.

    Attributes:
        connection: for one thread at a time.
        rule: names the rule by which returns and advantage groups are made; equal rules give equal ones for the same facts.
            Empty if a package's reward is part of it, which may change with the package.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        discount: float,
        threads: int,
        *,
        start_groups: bool = False,
        connection: duckdb.DuckDBPyConnection | None = None,
    ) -> None:
        """Create the empty tables.

        Args:
            connection: a database in memory that others use too, in whose current schema the tables are made; None: their own.
            weights: weight of each reward component; see `returns.returns_of`.
            discount: see `returns.returns_of`.
            threads: threads of DuckDB; 0: one per core.
            start_groups: keep the table `start_groups`.
        """
        self._weights, self._discount = weights, discount
        self._settled: list[str] = []
        rule = [sorted(weights.items()), discount, sha256(GROUPS_SQL.encode()).hexdigest()[:16]]
        self.rule = json.dumps(rule) if {name.removeprefix(FINAL) for name in weights} <= set(COMPONENTS) else ""
        self.connection = duckdb.connect(":memory:") if connection is None else connection
        # In a notebook without ipywidgets DuckDB has no bar, and refuses to be told so.
        if self.connection.sql("SELECT current_setting('enable_progress_bar')").fetchall() != [(False,)]:
            self.connection.execute("SET enable_progress_bar = false")
        if threads:
            self.connection.execute(f"SET threads = {threads}")
        self._insert_decisions(
            DECISION_FACTS.empty_table(),
            "CREATE TABLE decisions AS FROM valued",
            f"CREATE TABLE advantage_groups AS {GROUPS_SQL}",
            f"CREATE TABLE start_groups AS {_START_GROUPS}",
        )
        self._start_groups = [f"INSERT INTO start_groups BY NAME {_START_GROUPS}"] if start_groups else []
        refused = pa.schema({"shard": pa.string(), "sentence": pa.string()}).empty_table()
        record = record_rows(0, ROWS_SCHEMA.empty_table())
        for table, rows in {
            "plies": PLY_FACTS.empty_table(),
            "batches": record,
            "used_groups": record.select(_USED_GROUP),
            "refused": refused,
        }.items():
            self._with(rows, "arrow", f"CREATE TABLE {table} AS FROM arrow")
        self.connection.execute(_GROUPS_VIEW)

    def add_shards(self, shards: Sequence[ShardFacts]) -> None:
        """Add facts of shards, in one statement per table, because a statement costs more than its rows."""
        if not shards:
            return
        self._insert_decisions(
            pa.concat_tables([shard.decisions for shard in shards]),
            "INSERT INTO decisions BY NAME FROM valued",
            f"INSERT INTO advantage_groups BY NAME {GROUPS_SQL}",
            *self._start_groups,
        )
        self._with(pa.concat_tables([shard.plies for shard in shards]), "arrow", "INSERT INTO plies BY NAME FROM arrow")

    def add_records(self, records: Sequence[pa.Table]) -> None:
        """Add rows of ledgers, as `record_rows` returns them."""
        if not records:
            return
        self._with(
            pa.concat_tables(records),
            "arrow",
            "INSERT INTO batches BY NAME FROM arrow",
            f"INSERT INTO used_groups BY NAME SELECT DISTINCT {', '.join(_USED_GROUP)} FROM arrow",
        )

    def compress(self) -> None:
        """Compress the tables in memory, and give Arrow's free memory back. DuckDB inserts rows uncompressed."""
        self.connection.execute("CHECKPOINT")
        pa.default_memory_pool().release_unused()

    def drop_shard(self, shard: str) -> None:
        """Delete the rows of a shard; what ledgers recorded stays."""
        for table in _FACTS:
            self.connection.execute(f"DELETE FROM {table} WHERE shard = ?", [shard])

    def settle(self, shards: Sequence[str], settled: Settled) -> None:
        """Count the facts of these shards, and what ledgers recorded of them, in `settled`, and take the facts out of the tables.

        The tables are made anew, because deleted rows would stay in memory; so it costs what the other shards take. Records stay
        until `drop_settled_records`.
        """
        self._name_going(shards)
        for usable, has_spread, uses, groups in self.connection.sql(_FATES).fetchall():
            settled.fates[usable, has_spread, uses] += groups
        played, recorded = (
            self.connection.sql(f"SELECT {counted} FROM {table} SEMI JOIN going USING (shard)").fetchall()[0]
            for table, counted in (
                ("decisions", "count(*), coalesce(sum(orders_rejected), 0)"),
                ("batches", "coalesce(max(policy_lag), 0), coalesce(max(step), 0)"),
            )
        )
        settled.decisions += int(played[0])
        settled.orders_rejected += int(played[1])
        settled.max_policy_lag = max(settled.max_policy_lag, int(recorded[0]))
        settled.newest_step = max(settled.newest_step, int(recorded[1]))
        self._keep_rest(*_FACTS)
        self._settled += shards

    def drop_settled_records(self) -> None:
        """Take what ledgers recorded of settled shards out of the tables, and compress these."""
        self._name_going(self._settled)
        self._keep_rest(*_RECORDS)
        self._settled = []
        self.compress()

    def _name_going(self, shards: Sequence[str]) -> None:
        named = pa.table({"shard": pa.array(shards, pa.string())})
        self._with(named, "named", "CREATE OR REPLACE TEMP TABLE going AS FROM named")

    def _keep_rest(self, *tables: str) -> None:
        """Make the tables anew without the rows of shards in `going`."""
        for table in tables:
            self.connection.execute(f"CREATE TABLE rest AS FROM {table} ANTI JOIN going USING (shard)")
            self.connection.execute(f"DROP TABLE {table}")
            self.connection.execute(f"ALTER TABLE rest RENAME TO {table}")

    def open_ledgers(self) -> set[int]:
        """Steps of the ledgers that have rows in the tables."""
        return {step for (step,) in self.connection.sql("SELECT DISTINCT step FROM batches").fetchall()}

    def clear(self) -> None:
        """Delete everything."""
        for table in (*_FACTS, *_RECORDS, "start_groups", "refused"):
            self.connection.execute(f"DELETE FROM {table}")
        self._settled = []

    def refuse(self, name: str, sentence: str) -> None:
        """Record a shard or snapshot that is set aside."""
        self.connection.execute("INSERT INTO refused VALUES (?, ?)", [name, sentence])

    def refused(self) -> list[tuple[str, str]]:
        """Names of what was set aside, each with the reason."""
        return self.connection.sql("SELECT shard, sentence FROM refused ORDER BY shard").fetchall()

    def facts(self, shards: Sequence[str]) -> ShardFacts:
        """The facts of these shards, without returns.

        They are copied once, because an allocator keeps what copies needed: 60 MB in a run of 2,000 steps.
        """

        def rows(table: str, schema: pa.Schema) -> pa.Table:
            columns = ", ".join(f'"{name}"' for name in schema.names)
            query = f"SELECT {columns} FROM {table} WHERE shard IN (SELECT unnest($shards::VARCHAR[]))"
            return self.connection.sql(query, params={"shards": list(shards)}).to_arrow_table().cast(schema)

        return ShardFacts(decisions=rows("decisions", DECISION_FACTS), plies=rows("plies", PLY_FACTS))

    def chosen(self, query: str, values: Mapping[str, object]) -> pa.Table:
        """The rows that a query selects, with the columns of `ledger.ROWS_SCHEMA`."""
        return self.connection.sql(query, params=dict(values)).to_arrow_table().cast(ROWS_SCHEMA).combine_chunks()

    def totals(self, settled: Settled) -> Totals:
        """Counts over everything in the tables and over the settled shards."""
        (played,) = self.connection.sql("SELECT count(*), coalesce(sum(orders_rejected), 0) FROM decisions").fetchall()
        (trained,) = self.connection.sql("SELECT coalesce(max(policy_lag), 0) FROM batches").fetchall()
        return Totals(
            decisions=int(played[0]) + settled.decisions,
            orders_rejected=int(played[1]) + settled.orders_rejected,
            max_policy_lag=max(int(trained[0]), settled.max_policy_lag),
        )

    def _insert_decisions(self, decisions: pa.Table, *statements: str) -> None:
        returns = returns_of(decisions, self._weights, self._discount)
        self._with(decisions.append_column("return", pa.array(returns, pa.float64())), "valued", *statements)

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


def record_rows(step: int, rows: pa.Table) -> pa.Table:
    """Rows of a ledger with the columns of `batches`."""
    return with_constants(numbered(rows.replace_schema_metadata(None), "place"), step=step)
