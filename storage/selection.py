"""The query of a trainer step and the rows that it selects. `select_batch.sql` defines the rule.

Advantage groups are selected whole. The same tables and the same query give the same rows in the same order, in any process and
with any number of threads. The ledger stores the query.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path

import duckdb
import pyarrow as pa

from storage.ledger import ROWS_SCHEMA, Eligible
from storage.own_selection import keys_of, order_candidates

_SQL = Path(__file__).with_name("select_batch.sql").read_text()
_FROM_DRAWN = "WITH " + _SQL[_SQL.index("chosen AS (") :]
"""The end of `select_batch.sql`: from the start groups in a table `drawn` to their rows."""
STANDINGS = ("eligible", "used", "unusable", "ahead", "expired", "no_spread")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionQuery:
    """What a trainer step asks for."""

    step: int
    """The step that will use the rows; part of the draw's seed."""
    policy_version: int
    """Version that the trainer holds; the lag is counted from it."""
    max_policy_lag: int
    """Largest lag of the oldest row of an advantage group, versions."""
    start_groups: int
    """Maximum number of start groups."""
    seed: int
    """Seed of the draw."""
    max_uses: int = 1
    """Steps that may use an advantage group."""
    selection: str = ""
    """The user's query that chooses the start groups instead of the draw; empty: the draw."""

    def to_json(self) -> str:
        """The query as JSON, for the ledger."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "SelectionQuery":
        """The query that a ledger stores. An older one also names values that `select_batch.sql` has now."""
        stored = json.loads(text)
        return cls(**{field.name: stored[field.name] for field in fields(cls) if field.name in stored})


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rows for one step. There may be fewer start groups than wanted, or none."""

    rows: pa.Table
    """In the order of the batch, with the columns of `ledger.ROWS_SCHEMA`."""
    start_groups: int
    """Number of start groups of the rows."""
    counts: dict[str, int]
    """Advantage groups by standing (select_batch.sql), of all shards that the index has held; eligible = chosen + waiting."""
    query: SelectionQuery
    """The query."""

    @property
    def shortage(self) -> str:
        """A sentence if fewer start groups were found than wanted; empty if there were enough."""
        found, wanted = self.start_groups, self.query.start_groups
        return f"step {self.query.step} found only {found} of {wanted} start groups to train on" if found < wanted else ""


def select(connection: duckdb.DuckDBPyConnection, query: SelectionQuery, left: Mapping[str, int]) -> Selection:
    """Rows for one step from the tables of an index, after `make_standings`.

    Args:
        left: advantage groups by standing that left the tables, because no step can reach them.
    """
    _, choice = connection.extract_statements(_SQL)
    if query.selection:
        drawn = order_candidates(connection, asdict(query)).slice(length=query.start_groups).select(["shard", "start_group"])
        connection.register("drawn", drawn.append_column("place", pa.array(range(drawn.num_rows), pa.int64())))
        (choice,) = connection.extract_statements(_FROM_DRAWN)
    values = asdict(query)
    chosen = connection.sql(choice.query, params={name: values[name] for name in choice.named_parameters})
    rows = chosen.to_arrow_table().cast(ROWS_SCHEMA).combine_chunks()
    if query.selection:
        connection.unregister("drawn")
    found = dict(connection.sql("SELECT standing, count(*) FROM standings GROUP BY ALL").fetchall())
    groups = len(set(rows["advantage_group"].to_pylist()))
    counts = {name: found.get(name, 0) + left.get(name, 0) for name in STANDINGS}
    counts |= {"chosen": groups, "waiting": counts["eligible"] - groups}
    start_groups = len(set(keys_of(rows)))
    return Selection(rows=rows, start_groups=start_groups, counts=counts, query=query)


def eligible(connection: duckdb.DuckDBPyConnection, query: SelectionQuery, left: Mapping[str, int]) -> Eligible:
    """How much the step could choose from, after `make_standings`; `left` as in `select`."""
    counted = """
        SELECT
            count(DISTINCT (shard, start_group)) FILTER (standing = 'eligible'),
            count(*) FILTER (standing = 'eligible'),
            count(*) FILTER (standing = 'expired' AND has_spread)
        FROM standings
    """
    ((start_groups, advantage_groups, expired),) = connection.sql(counted).fetchall()
    if query.selection:
        wanted = order_candidates(connection, asdict(query))
        start_groups, advantage_groups = wanted.num_rows, sum(wanted["advantage_groups"].to_pylist())
    expired += left.get("expired_with_spread", 0)
    return Eligible(start_groups=start_groups, advantage_groups=advantage_groups, expired=expired)


def make_standings(connection: duckdb.DuckDBPyConnection, query: SelectionQuery) -> None:
    """Make the table `standings`: for each advantage group, whether the step can train on it, and if not, why. See `select`."""
    standing, _ = connection.extract_statements(_SQL)
    values = asdict(query)
    connection.execute(standing, {name: values[name] for name in standing.named_parameters})


def selection_rule() -> dict[str, str]:
    """What a choice depends on beside the query, for the ledger: hash of the SQL, and version of DuckDB."""
    return {"select_batch.sql": sha256(_SQL.encode()).hexdigest()[:16], "duckdb": duckdb.__version__}
