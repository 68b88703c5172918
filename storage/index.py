"""The index of a run: an in-memory DuckDB with the facts of its rows, without tokens.

Shards and ledgers are the truth. Any process may build its own index at any time, without locks, while others write. An index
opens from the intact parts of the snapshot in `index/`, if there are any, plus newer shards.

An index has the facts of every row, unless it is given a `Reach`. Then it keeps those that a step can still choose, and counts of
the others (`storage/settled.py`): it chooses the same rows with the same counts, and does not grow with the past. A query that
reaches further back opens it anew.

A shard is verified when it is first mapped: without a snapshot, as it comes in; else when one of its rows is first gathered
(storage/snapshots.py says what that leaves open). A damaged shard is set aside with a sentence (`refused`). A damaged ledger is
an error, because it decides which rows are used. Selection is deterministic and does not depend on snapshots.

Several threads may call the methods; a lock runs them one at a time. `connection` is for one thread, which calls no method
meanwhile, because an open DuckDB result owns its connection. DuckDB neither holds nor returns token lists, and only
`snapshot_if_due` writes into the run.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import duckdb
import pyarrow as pa

from storage.fact_tables import FactTables
from storage.gather import Batch, gather
from storage.intake import EVERY_VERSION, Intake
from storage.look_ahead import LookAhead
from storage.mapped import MappedShard, MappedShards, ShardDamaged
from storage.packing import PackingBuffers
from storage.rewards import check_blend
from storage.runs import RunPaths
from storage.selection import Reach, Selection, SelectionQuery, eligible, select
from storage.settled import write_settled
from storage.shards import open_shard
from storage.snapshots import CoveredShard, IndexSnapshot
from storage.totals import Eligible, Totals
from telemetry.errors import DataError

_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")


def _locked(method: "Callable[Concatenate[Index, _Given], _Answer]") -> "Callable[Concatenate[Index, _Given], _Answer]":
    """The method, run under the index's lock."""

    @wraps(method)
    def run(self: "Index", *given: _Given.args, **named: _Given.kwargs) -> _Answer:
        with self._busy:
            return method(self, *given, **named)

    return run


class Index:
    """One process's view of a run; `refresh` adds what was published since."""

    def __init__(
        self,
        paths: RunPaths,
        *,
        blend: Mapping[str, float] | None = None,
        discount: float = 1.0,
        threads: int = 1,
        reach: Reach | None = None,
        start_groups: bool = False,
        connection: duckdb.DuckDBPyConnection | None = None,
    ) -> None:
        """Create an empty index; `refresh` fills it.

        Args:
            blend: weight of each reward component in a decision's return; None: centres alone.
            discount: factor per later decision of the same power in the fork.
            threads: threads of DuckDB; 0: one per core. With more than one, DuckDB's idle threads make the allocator return the
                free memory of the whole process several times a second. A trainer then spent a tenth of its CPU time on getting
                its activations' pages back from the kernel.
            reach: what the steps to come can choose from; None: the tables keep every fact.
            start_groups: the table `start_groups` has a row for each start group, and the other tables keep no fact.
            connection: a database in memory in whose current schema the tables are made; None: one of its own.

        Raises:
            InputError: the blend names an unknown component.
        """
        weights = {"centres_gained": 1.0} if blend is None else dict(blend)
        check_blend(weights)
        self._paths, self._reach = paths, reach
        floats = {name: float(weight) for name, weight in weights.items()}
        self._tables = FactTables(floats, float(discount), threads, start_groups=start_groups, connection=connection)
        self._mapped = MappedShards(paths.shards)
        if start_groups:
            self._intake = Intake(paths, self._tables, self._mapped, oldest=EVERY_VERSION, for_steps=False)
        else:
            oldest = None if reach is None else reach.oldest
            self._intake = Intake(paths, self._tables, self._mapped, rule=self._tables.rule, oldest=oldest)
        self._buffers = PackingBuffers()
        self._ahead = LookAhead()
        self._busy = threading.RLock()
        self._compressed = False
        self.connection = self._tables.connection

    def refresh(self, *, listed: bool = False) -> int:
        """Take in new shards and ledgers; returns the number of new decisions.

        Args:
            listed: list every producer's folder. Without that, a shard whose number is far beyond the last one is found up to
                `RELIST_SECONDS` later (`storage/follow.py`).
        """
        self._ahead.settle()  # the look-ahead must not change the tables after this call
        return self._refresh(listed=listed)

    @_locked
    def _refresh(self, *, listed: bool = False) -> int:
        new_rows = self._intake.refresh(listed=listed)
        if self._intake.overtaken:
            self._open_anew(self._intake.settled.below, trust=False)
        if self._intake.oldest == EVERY_VERSION:
            self._intake.settle(EVERY_VERSION)
        return new_rows

    def _open_anew(self, oldest: int, *, trust: bool = True) -> None:
        """Read the run again, with the facts of version `oldest` and of newer ones.

        Args:
            trust: take over a record of settled shards, if there is one.
        """
        self._tables.clear()
        self._intake = Intake(self._paths, self._tables, self._mapped, rule=self._tables.rule if trust else "", oldest=oldest)
        self._intake.refresh()

    def _settled(self, query: SelectionQuery) -> Counter[str]:
        """The counts of the advantage groups that the query cannot reach; their facts leave the tables."""
        if self._reach is None:
            return Counter()
        if query.policy_version - query.max_policy_lag < self._intake.settled.below:
            self._open_anew(query.policy_version - query.max_policy_lag)
        lag = max(query.max_policy_lag, self._reach.max_policy_lag)
        self._intake.settle(Reach(policy_version=query.policy_version, max_policy_lag=lag).oldest)
        return self._intake.settled.standings(query.max_uses)

    @property
    @_locked
    def refused(self) -> list[tuple[str, str]]:
        """Shards and snapshots that were set aside, each with the reason."""
        return self._tables.refused()

    @_locked
    def seen(self) -> str:
        """The start groups of all shards read, as JSON: producer -> [first, one after the last] of each range."""
        return self._intake.known.seen()

    @_locked
    def select_batch(self, query: SelectionQuery) -> Selection:
        """Rows for one step, as `select_batch.sql` defines them. Call `refresh` first to include new shards."""
        settled = self._settled(query)
        return replace(select(self.connection, query, settled), seen=self.seen())

    @_locked
    def eligible(self, query: SelectionQuery) -> Eligible:
        """How much `select_batch` could choose from. Call `refresh` first to include new shards."""
        settled = self._settled(query)
        return eligible(self.connection, query, settled)

    @_locked
    def fresh_rows(self, *, policy_version: int, limit: int) -> pa.Table:
        """At most `limit` complete rows of exactly this version, as a selection without advantage groups (-1)."""
        if policy_version < self._intake.settled.below:
            self._open_anew(policy_version)
        return self._tables.chosen(
            """
            SELECT shard, row, decision_id, start_group, fork, ply, power, phase, policy_version,
                0::INTEGER AS policy_lag, checksum, "return", (-1)::INTEGER AS advantage_group
            FROM decisions WHERE policy_version = $policy_version AND status = 'complete'
            ORDER BY start_group DESC, producer, fork, ply, power, row LIMIT $limit
            """,
            {"policy_version": policy_version, "limit": limit},
        )

    @_locked
    def totals(self) -> Totals:
        """Counts over all rows read."""
        return self._tables.totals(self._intake.settled)

    def gather(self, selection_rows: pa.Table) -> Batch:
        """Verified arrays of the rows of a selection or of a recorded step.

        Raises:
            DataError: a row is damaged. Its shard was set aside, so a new selection does not use it.
        """
        if (ready := self._ahead.batch_of(selection_rows)) is not None:
            return ready
        return self._gather(selection_rows)

    def look_ahead(self, query: SelectionQuery) -> None:
        """Prepare the next step's batch in another thread: refresh, choose and gather.

        `query` is a guess at the next step's query. The step still makes its own choice; it gets the prepared batch only if it
        chooses the same rows. So the guess affects speed, and never what a step trains on.
        """
        self._ahead.begin(lambda: self._prepare(query))

    @_locked
    def _prepare(self, query: SelectionQuery) -> tuple[pa.Table, Batch]:
        self._refresh()
        rows = self.select_batch(query).rows
        return rows, self._gather(rows)

    def _gather(self, rows: pa.Table) -> Batch:
        try:
            return gather(rows, self._open, self._buffers)
        except ShardDamaged as error:
            with self._busy:
                if error.shard not in self._intake.known.retired:  # the facts of a retired shard stay
                    self._intake.set_aside(error.shard, str(error))
            raise

    @_locked
    def verified_shards(self) -> list[pa.Table]:
        """The decisions of all shards, mapped and verified, sorted by shard name.

        Damaged shards, which a snapshot may have hidden, are set aside, so the index has exactly the rows of these tables.
        """
        tables = []
        for shard in sorted(self._intake.known.live):
            try:
                tables.append(open_shard(self._paths.shards / shard))
            except DataError as error:
                self._intake.take_in_tombstones()  # it may have been retired just now
                if shard not in self._intake.known.retired:
                    self._intake.set_aside(shard, str(error))
        return tables

    def find_shard(self, shard: str) -> CoveredShard | None:
        """The shard of this name, if it is in `shards/` and was not retired."""
        return self._intake.known.live.get(shard)

    @_locked
    def live(self) -> list[CoveredShard]:
        """The known shards in `shards/` that were not retired."""
        return list(self._intake.known.live.values())

    @_locked
    def newest_step(self) -> int:
        """The newest step whose ledger names a row; 0 if there is none."""
        ((newest,),) = self.connection.sql("SELECT coalesce(max(step), 0) FROM batches").fetchall()
        return max(int(newest), self._intake.settled.newest_step)

    @_locked
    def retired(self) -> list[CoveredShard]:
        """Retired shards: the index has facts or counts of their rows; their tokens are gone."""
        return list(self._intake.known.retired.values())

    @_locked
    def snapshot_of(self, shards: Sequence[CoveredShard]) -> IndexSnapshot:
        """The facts of these shards. One is left out if its facts are not in the tables and its file is damaged."""
        return self._intake.facts_of(shards)

    @_locked
    def fetch(self, query: str, values: Mapping[str, object] | None = None) -> list[tuple]:
        """The rows of a query over the tables."""
        return self.connection.sql(query, params=dict(values or {})).fetchall()

    @_locked
    def snapshot_if_due(self, every_shards: int) -> Path | None:
        """Write a part of the snapshot if `every_shards` are in no part; returns its path, or None. 0: never.

        Small parts are merged (`storage/parts.py`), and settled shards are recorded. Only the trainer's process may call this.
        The first call, and each one that writes, compresses the tables.
        """
        if every_shards and self._intake.unrecorded and self._tables.rule:
            write_settled(self._paths.index, self._intake.settled, self._tables.rule)
            self._intake.unrecorded = False
        loose = self._intake.known.loose
        if every_shards and self._intake.parts.spoiled:
            self._merge_parts()
        if every_shards == 0 or len(loose) < every_shards:
            if not self._compressed:
                self.compress()
            return None
        written = self._intake.parts.write(self._paths.index, self.snapshot_of(list(loose.values())))
        if written is not None:
            loose.clear()
            self._merge_parts()
        self.compress()
        return written

    def _merge_parts(self) -> None:
        self._intake.parts.merge(self._paths.index, lambda shard: self._intake.known.live.get(shard.name) == shard)

    @_locked
    def compress(self) -> None:
        """Compress the tables. It takes a second for a million new rows, so only a process that keeps its index does it."""
        self._tables.compress()
        self._compressed = True

    def _open(self, shard: str) -> MappedShard:
        try:
            return self._mapped.get(shard)
        except ShardDamaged as error:
            with self._busy:
                self._intake.take_in_tombstones()
            if shard not in self._intake.known.retired:
                raise
            raise ShardDamaged(f"Shard {shard} was retired: its rows were too old to train on", shard) from error


def open_index(paths: RunPaths, **how: Any) -> Index:
    """An index that knows the files of a run as they are now; arguments as for `Index`."""
    index = Index(paths, **how)
    index.refresh()
    return index
