"""What a trainer step asks for, and the rows it gets: the contract stands above ``select_batch.sql``.

Promise: whole advantage groups; the same tables and the same query give the same rows in the same order, in any process and on
any number of threads. What was asked can be written into the ledger and read back from it.
Never: wait for rows, open a file, or know what a lineage was forked from (the caller says what counts as used).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

import duckdb
import pyarrow as pa

from storage.ledger import ROWS_SCHEMA
from storage.totals import Eligible

_SQL = Path(__file__).with_name("select_batch.sql").read_text()
STANDINGS = ("eligible", "used", "unusable", "ahead", "expired", "no_spread")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionQuery:
    """What a trainer step asks for."""

    step: int
    """The step that will use the rows; enters the draw."""
    policy_version: int
    """Version that the trainer holds, from which the lag is counted."""
    max_policy_lag: int
    """Versions that the oldest row of an advantage group may lie behind."""
    start_groups: int
    """Start groups wanted, at most."""
    lineage: str
    """The ledger in which a row may stand ``max_uses`` times; enters the draw."""
    seed: int
    """Seed of the draw."""
    max_uses: int = 1
    """Steps that may use an advantage group."""
    min_spread: float = 0.0
    """Advantage groups whose returns differ by no more are left out."""
    freshness: float = 0.5
    """Factor of a group's weight in the draw for each version that its oldest row lies behind."""
    balance_powers: bool = True
    """Each power gets one of what is drawn before any gets a second."""
    draw: Literal["start_group", "advantage_group"] = "start_group"
    """What is drawn, each whole."""

    def to_json(self) -> str:
        """The query as JSON, for a ledger."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "SelectionQuery":
        """A query that a ledger tells of."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rows for one step; fewer start groups than asked for, or none, if there are no more fresh ones."""

    rows: pa.Table
    """In the batch's order, with the columns of ``ledger.ROWS_SCHEMA``."""
    start_groups: int
    """Start groups that the rows belong to."""
    counts: dict[str, int]
    """Advantage groups of the whole run by standing (select_batch.sql); eligible = chosen + waiting."""
    query: SelectionQuery
    """What was asked."""
    seen: str = ""
    """What was looked at; see `Index.seen`."""

    @property
    def enough(self) -> bool:
        """As much was found as was wanted."""
        return self.counts["waiting"] > 0 or self.start_groups >= self.query.start_groups


def select(connection: duckdb.DuckDBPyConnection, query: SelectionQuery, counts_as_used: Mapping[str, int]) -> Selection:
    """Rows for one step from the tables of an index.

    Args:
        counts_as_used: lineages whose ledgers say what was used, each with its last step that counts.
    """
    _, choice = connection.extract_statements(_SQL)
    make_standings(connection, query, counts_as_used)
    values = asdict(query)
    chosen = connection.sql(choice.query, params={name: values[name] for name in choice.named_parameters})
    rows = chosen.to_arrow_table().cast(ROWS_SCHEMA).combine_chunks()
    found = dict(connection.sql("SELECT standing, count(*) FROM standings GROUP BY ALL").fetchall())
    groups = len(set(rows["advantage_group"].to_pylist()))
    counts = {name: found.get(name, 0) for name in STANDINGS}
    counts |= {"chosen": groups, "waiting": counts["eligible"] - groups}
    start_groups = len(set(zip(rows["shard"].to_pylist(), rows["start_group"].to_pylist(), strict=True)))
    return Selection(rows=rows, start_groups=start_groups, counts=counts, query=query)


def eligible(connection: duckdb.DuckDBPyConnection, query: SelectionQuery, counts_as_used: Mapping[str, int]) -> Eligible:
    """How much there is for a step, without choosing."""
    make_standings(connection, query, counts_as_used)
    counted = """
        SELECT
            count(DISTINCT (shard, start_group)) FILTER (standing = 'eligible'),
            count(*) FILTER (standing = 'eligible'),
            count(*) FILTER (standing = 'expired' AND has_spread)
        FROM standings
    """
    ((start_groups, advantage_groups, expired),) = connection.sql(counted).fetchall()
    return Eligible(start_groups=start_groups, advantage_groups=advantage_groups, expired=expired)


def make_standings(connection: duckdb.DuckDBPyConnection, query: SelectionQuery, counts_as_used: Mapping[str, int]) -> None:
    """Make the table ``standings``: of every advantage group, whether the step could train on it; see `select`."""
    standing, _ = connection.extract_statements(_SQL)
    values = asdict(query) | {"lineages": list(counts_as_used), "until": list(counts_as_used.values())}
    connection.execute(standing, {name: values[name] for name in standing.named_parameters})


def selection_rule() -> dict[str, str]:
    """What, beside the query, a choice depended on: for a ledger."""
    return {"select_batch.sql": sha256(_SQL.encode()).hexdigest()[:16], "duckdb": duckdb.__version__}
