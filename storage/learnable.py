"""What the past start groups of each snapshot returned. The spread of the last ones measures how much it still teaches.

The result depends only on rows before a given start group. So a step that is repeated after a crash gets the same values. The
sampler turns them into weights and draws. `PastReturnsProcess` works in a separate process: the caller does not load DuckDB, and
its memory does not grow.
"""

import multiprocessing
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pyarrow as pa

from storage.runs import RunPaths
from storage.shards import open_shard, shard_names
from telemetry.errors import DataError
from telemetry.parent import end_with_parent

RECENT = 4
"""Newest start groups of a snapshot that count; older ones were played by a policy that has changed since."""
_START_GROUPS, _SPREAD = (Path(__file__).with_name(name).read_text() for name in ("start_groups.sql", "spread.sql"))


class PastReturns:
    """Reads each shard once, and keeps a row for each start group; any thread may call it."""

    def __init__(self, paths: RunPaths, *, blend: Mapping[str, float], discount: float) -> None:
        """`blend` and `discount` of the returns, as in the trainer's settings."""
        import duckdb

        from storage.fact_tables import NO_FACTS

        self._paths, self._blend, self._discount = paths, dict(blend), discount
        self._read: set[str] = set()
        self._lock = threading.Lock()
        self._connection = duckdb.connect(":memory:", config={"threads": 1})
        self._execute(NO_FACTS.decisions, f"CREATE TABLE start_groups AS {_START_GROUPS}")

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

    def _read_shard(self, name: str) -> None:
        from storage.fact_tables import decision_facts

        try:
            rows = open_shard(self._paths.shards / name)
        except DataError:
            return  # the trainer's index says so
        facts = decision_facts(rows, name.partition("/")[0], name)
        self._execute(facts, f"INSERT INTO start_groups BY NAME {_START_GROUPS}")

    def _execute(self, facts: pa.Table, statement: str) -> None:
        from storage.fact_tables import valued

        self._connection.register("valued", valued(facts, self._blend, self._discount))
        self._connection.execute(statement)
        self._connection.unregister("valued")


class PastReturnsProcess:
    """`PastReturns` in a separate process.

    The process starts with the first call. If it dies, a new one is started; it holds nothing that is not in files.
    """

    def __init__(self, paths: RunPaths, *, blend: Mapping[str, float], discount: float) -> None:
        """See `PastReturns`."""
        self._arguments = (paths, dict(blend), discount)
        self._process: ProcessPoolExecutor | None = None
        self._lock = threading.Lock()

    def spreads_before(self, producer: str, start_group: int) -> dict[str, float]:
        """See `PastReturns.spreads_before`."""
        with self._lock:
            try:
                return self._ask(producer, start_group)
            except BrokenProcessPool:
                self.close()
                return self._ask(producer, start_group)

    def close(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            self._process.shutdown()
            self._process = None

    def _ask(self, producer: str, start_group: int) -> dict[str, float]:
        if self._process is None:
            spawn = multiprocessing.get_context("spawn")
            self._process = ProcessPoolExecutor(1, mp_context=spawn, initializer=_open, initargs=self._arguments)
        return self._process.submit(_spreads_before, producer, start_group).result()


_mine: PastReturns
"""In the separate process: its `PastReturns`."""


def _open(paths: RunPaths, blend: Mapping[str, float], discount: float) -> None:
    global _mine
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent ends this process
    end_with_parent()
    _mine = PastReturns(paths, blend=blend, discount=discount)


def _spreads_before(producer: str, start_group: int) -> dict[str, float]:
    return _mine.spreads_before(producer, start_group)
