"""What the past start groups of each snapshot returned. The spread of the last ones measures how much it still teaches.

The result depends only on rows before a given start group. So a step that is repeated after a crash gets the same values. The
sampler turns them into weights and draws. DuckDB is loaded when it is first asked.
"""

import threading
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from entente.telemetry.errors import DataError
from storage.runs import RunPaths
from storage.shards import open_shard, shard_names

RECENT = 4
"""Newest start groups of a snapshot that count; older ones were played by a policy that has changed since."""
_START_GROUPS, _SPREAD = (Path(__file__).with_name(name).read_text() for name in ("start_groups.sql", "spread.sql"))


class PastReturns:
    """Reads each shard once, and keeps a row for each start group; any thread may call it."""

    def __init__(self, paths: RunPaths, *, blend: Mapping[str, float], discount: float) -> None:
        """`blend` and `discount` of the returns, as in the trainer's settings."""
        self._paths, self._blend, self._discount = paths, dict(blend), discount
        self._read: set[str] = set()
        self._lock = threading.Lock()

    def spreads_before(self, producer: str, start_group: int) -> dict[str, float]:
        """Snapshot id -> mean over its newest `RECENT` start groups of the mean spread of their advantage groups.

        Start groups of the `producer` with smaller numbers than `start_group` count, if they could be trained on.
        """
        with self._lock:
            for name in shard_names(self._paths):
                if name not in self._read:
                    self._read.add(name)
                    self._read_shard(name)
            values = {"producer": producer, "before": start_group, "recent": RECENT}
            return dict(self._connection.execute(_SPREAD, values).fetchall())

    @cached_property
    def _connection(self) -> Any:
        import duckdb

        from storage.fact_tables import NO_FACTS

        connection = duckdb.connect(":memory:", config={"threads": 1})
        self._execute(connection, NO_FACTS.decisions, f"CREATE TABLE start_groups AS {_START_GROUPS}")
        return connection

    def _read_shard(self, name: str) -> None:
        from storage.fact_tables import decision_facts

        try:
            rows = open_shard(self._paths.shards / name)
        except DataError:
            return  # the trainer's index says so
        facts = decision_facts(rows, name.partition("/")[0], name)
        self._execute(self._connection, facts, f"INSERT INTO start_groups BY NAME {_START_GROUPS}")

    def _execute(self, connection: Any, facts: pa.Table, statement: str) -> None:
        from storage.fact_tables import valued

        connection.register("valued", valued(facts, self._blend, self._discount))
        connection.execute(statement)
        connection.unregister("valued")
