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
from storage.rewards import decision_facts
from storage.runs import RunPaths
from storage.schema import to_table
from storage.shards import open_shard, shard_names

RECENT = 4
"""Newest start groups of a snapshot that count; older ones were played by a policy that has changed since."""
_GROUPS, _SPREAD = (Path(__file__).with_name(name).read_text() for name in ("advantage_groups.sql", "spread.sql"))


class PastReturns:
    """Reads each shard once, and keeps a row for each advantage group; any thread may call it."""

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

        connection = duckdb.connect(":memory:", config={"threads": 1})
        self._put(connection, "", to_table([]), "CREATE TABLE groups AS")
        return connection

    def _read_shard(self, name: str) -> None:
        try:
            rows = open_shard(self._paths.shards / name)
        except DataError:
            return  # the trainer's index says so
        self._put(self._connection, name, rows, "INSERT INTO groups BY NAME")

    def _put(self, connection: Any, shard: str, rows: pa.Table, into: str) -> None:
        connection.register("given", decision_facts(rows, shard, self._blend, self._discount))
        connection.execute(f"{into} {_GROUPS}")
        connection.unregister("given")
