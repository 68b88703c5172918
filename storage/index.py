"""The index of a run: an in-memory DuckDB with the facts of every row, without tokens.

Shards and ledgers are the truth. Any process may build its own index at any time, without locks, while others write. An index
opens from the newest intact snapshot in `index/`, if there is one, plus newer shards.

A shard is verified when it is first mapped: without a snapshot, as it comes in; else when one of its rows is first gathered
(storage/snapshots.py says what that leaves open). A damaged shard is set aside with a sentence (`refused`). A damaged ledger is
an error, because it decides which rows are used. Selection is deterministic and does not depend on snapshots.

Several threads may call the methods; a lock runs them one at a time. `connection` is for one thread, which calls no method
meanwhile, because an open DuckDB result owns its connection. DuckDB neither holds nor returns token lists, and only
`snapshot_if_due` writes into the run.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import duckdb
import pyarrow as pa

from storage.archive import archived
from storage.ends import ends_of, sequences_of
from storage.fact_tables import FactTables
from storage.gather import Batch, gather
from storage.intake import Intake
from storage.lineages import counts_as_used
from storage.look_ahead import LookAhead
from storage.mapped import MappedShard, MappedShards, ShardDamaged
from storage.packing import PackingBuffers
from storage.rewards import check_blend
from storage.runs import RunPaths
from storage.selection import Selection, SelectionQuery, eligible, select
from storage.shards import open_plies, open_shard
from storage.snapshots import CoveredShard, IndexSnapshot, drop_old_snapshots, write_snapshot
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
        ends: bool = False,
        connection: duckdb.DuckDBPyConnection | None = None,
    ) -> None:
        """Create an empty index; `refresh` fills it.

        Args:
            blend: weight of each reward component in a decision's return; None: centres alone.
            discount: factor per later decision of the same power in the fork.
            threads: threads of DuckDB; 0: one per core. With more than one, DuckDB's idle threads make the allocator return the
                free memory of the whole process several times a second. A trainer then spent a tenth of its CPU time on getting
                its activations' pages back from the kernel.
            ends: gathered batches have the ends of their forks.
            connection: a database in memory in whose current schema the tables are made; None: one of its own.

        Raises:
            InputError: the blend names an unknown component.
        """
        weights = {"centres_gained": 1.0} if blend is None else dict(blend)
        check_blend(weights)
        self._paths, self._ends = paths, ends
        self._tables = FactTables({name: float(weight) for name, weight in weights.items()}, float(discount), threads, connection)
        self._mapped = MappedShards(paths.shards)
        self._intake = Intake(paths, self._tables, self._mapped)
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
        return self._intake.refresh(listed=listed)

    @property
    @_locked
    def refused(self) -> list[tuple[str, str]]:
        """Shards and snapshots that were set aside, each with the reason."""
        return self._tables.refused()

    @_locked
    def seen(self) -> str:
        """The start groups of all shards read, as JSON: producer -> [first, one after the last] of each range."""
        return self._intake.seen()

    @_locked
    def select_batch(self, query: SelectionQuery) -> Selection:
        """Rows for one step, as `select_batch.sql` defines them. Call `refresh` first to include new shards."""
        return replace(select(self.connection, query, counts_as_used(self._paths, query.lineage)), seen=self.seen())

    @_locked
    def eligible(self, query: SelectionQuery) -> Eligible:
        """How much `select_batch` could choose from. Call `refresh` first to include new shards."""
        return eligible(self.connection, query, counts_as_used(self._paths, query.lineage))

    @_locked
    def fresh_rows(self, *, policy_version: int, limit: int) -> pa.Table:
        """At most `limit` complete rows of exactly this version, as a selection without advantage groups (-1)."""
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
        return self._tables.totals()

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
            batch = gather(rows, self._open, self._buffers)
            if not self._ends:
                return batch
            ends = ends_of(rows, lambda shard: self._open(shard).table, self._plies)
            return replace(batch, ends=ends, sequences=sequences_of(rows))
        except ShardDamaged as error:
            with self._busy:
                if error.shard not in self._intake.retired:  # the facts of a retired shard stay
                    self._intake.set_aside(error.shard, str(error))
            raise

    @_locked
    def verified_shards(self) -> list[pa.Table]:
        """The decisions of all shards, mapped and verified, sorted by shard name.

        Damaged shards, which a snapshot may have hidden, are set aside, so the index has exactly the rows of these tables.
        """
        tables = []
        for shard in sorted(self._intake.shards):
            try:
                tables.append(open_shard(self._paths.shards / shard))
            except DataError as error:
                self._intake.take_in_tombstones()  # it may have been retired just now
                if shard not in self._intake.retired:
                    self._intake.set_aside(shard, str(error))
        return tables

    def find_shard(self, shard: str) -> CoveredShard | None:
        """The shard of this name, if it is in `shards/` and was not retired."""
        return self._intake.shards.get(shard)

    @_locked
    def retired(self) -> list[CoveredShard]:
        """Retired shards: the index has the facts of their rows; their tokens are in the archive, or gone."""
        return list(self._intake.retired.values())

    @_locked
    def snapshot_of(self, shards: Sequence[CoveredShard]) -> IndexSnapshot:
        """The facts of these shards."""
        facts = self._tables.facts([shard.name for shard in shards])
        return IndexSnapshot(shards=tuple(shards), decisions=facts.decisions, plies=facts.plies)

    @_locked
    def fetch(self, query: str, values: Mapping[str, object] | None = None) -> list[tuple]:
        """The rows of a query over the tables."""
        return self.connection.sql(query, params=dict(values or {})).fetchall()

    @_locked
    def snapshot_if_due(self, every_shards: int) -> Path | None:
        """Write an index snapshot if enough shards are new since the last one; returns its path, or None.

        Enough is `every_shards`, and at least an eighth of all; 0: never. Of the older snapshots the newest is kept. Only the
        trainer's process may call this. The first call, and each one that writes, compresses the tables.
        """
        new = len(self._intake.shards) - self._intake.in_snapshot
        if every_shards == 0 or new < max(every_shards, len(self._intake.shards) // 8):
            if not self._compressed:
                self.compress()
            return None
        self._intake.in_snapshot = len(self._intake.shards)
        written = write_snapshot(self._paths.index, self.snapshot_of(list(self._intake.shards.values())))
        drop_old_snapshots(self._paths)
        self.compress()
        return written

    @_locked
    def compress(self) -> None:
        """Compress the tables. It takes a second for a million new rows, so only a process that keeps its index does it."""
        self._tables.compress()
        self._compressed = True

    def _plies(self, shard: str) -> pa.Table:
        """The plies of a shard that is not retired; no step needs those of another.

        Raises:
            ShardDamaged: they are missing or damaged.
        """
        try:
            return open_plies(self._paths.shards / shard, self._open(shard).table)
        except (DataError, KeyError) as error:  # the archived table names no plies
            raise ShardDamaged(f"Shard {shard} has no plies that can be read: {error}", shard) from error

    def _open(self, shard: str) -> MappedShard:
        try:
            return self._mapped.get(shard)
        except ShardDamaged as error:
            with self._busy:
                self._intake.take_in_tombstones()
            if shard not in self._intake.retired:
                raise
            try:
                return MappedShard(shard, archived(self._paths, shard))
            except DataError as missing:
                sentence = f"Shard {shard} was retired because its rows were too old, and it is not in the archive: {missing}"
                raise ShardDamaged(sentence, shard) from error
