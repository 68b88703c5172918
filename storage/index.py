"""The lens over a run's files: an in-memory DuckDB that knows every row's facts and none of its tokens.

Promise: shards and ledgers are the truth, and any process may build its own index over them at any time,
without locks, while others write. It opens from the newest whole snapshot in ``index/``, if there is one, and newer
shards. Every row that is gathered is verified; a shard is, as a whole, when it is first mapped: those that no snapshot
covers as they come in, the others when a row of them is first gathered (storage/snapshots.py says what that leaves
open). What cannot be verified is set aside with a sentence (``refused``) and the rest goes on; a ledger that
cannot be verified is an error, since nobody could then say what was trained on. Selection is deterministic, and
does not depend on whether there was a snapshot.
Its methods may be called by several threads, and follow one another; ``connection`` is for one thread, which calls no
method meanwhile (an open DuckDB result owns its connection).
Never: let DuckDB hold or return token lists, or write into the run but for ``snapshot_if_due``.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from storage.archive import archived
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
from storage.shards import open_shard
from storage.snapshots import CoveredShard, IndexSnapshot, drop_old_snapshots, write_snapshot
from storage.totals import Eligible, Totals
from telemetry.errors import DataError

_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")


def _alone(method: "Callable[Concatenate[Index, _Given], _Answer]") -> "Callable[Concatenate[Index, _Given], _Answer]":
    """The method, run while no other of the index runs."""

    @wraps(method)
    def run(self: "Index", *given: _Given.args, **named: _Given.kwargs) -> _Answer:
        with self._busy:
            return method(self, *given, **named)

    return run


class Index:
    """One process's view of a run; ``refresh`` takes in what was published since."""

    def __init__(
        self, paths: RunPaths, *, blend: Mapping[str, float] | None = None, discount: float = 1.0, threads: int = 1
    ) -> None:
        """See what was published in a run.

        Args:
            blend: weight of each reward component in a decision's return; None: centres alone.
            discount: of what comes after a decision, by ply.
            threads: of DuckDB, 0 for a thread a core. With more than one, those that are idle have the allocator give back the
                whole process's free memory, several times a second: a trainer then fetched its activations page by page from
                the kernel, a tenth of its CPU seconds.

        Raises:
            InputError: the blend weighs what is no component.
        """
        weights = {"centres_gained": 1.0} if blend is None else dict(blend)
        check_blend(weights)
        self._paths = paths
        self._tables = FactTables({name: float(weight) for name, weight in weights.items()}, float(discount), threads)
        self._mapped = MappedShards(paths.shards)
        self._intake = Intake(paths, self._tables, self._mapped)
        self._buffers = PackingBuffers()
        self._ahead = LookAhead()
        self._busy = threading.RLock()
        self.connection = self._tables.connection

    def refresh(self, *, listed: bool = False) -> int:
        """Take in new shards and ledger records; returns the number of new decisions.

        Args:
            listed: list every producer's folder. A shard whose number lies far beyond the last one is else found up to
                `RELIST_SECONDS` later (`storage/follow.py`).
        """
        self._ahead.settle()  # so that nothing is taken in behind the back of whoever chooses now
        return self._refresh(listed=listed)

    @_alone
    def _refresh(self, *, listed: bool = False) -> int:
        return self._intake.refresh(listed=listed)

    @property
    @_alone
    def refused(self) -> list[tuple[str, str]]:
        """Shards and snapshots set aside, each with the sentence that says why."""
        return self._tables.refused()

    @_alone
    def seen(self) -> str:
        """The start groups that were looked at, as JSON: producer -> [first, after the last] of each stretch of shards."""
        return self._intake.seen()

    @_alone
    def select_batch(self, query: SelectionQuery) -> Selection:
        """Rows for one step by the contract in ``select_batch.sql``; ``refresh`` before shows what is new."""
        return replace(select(self.connection, query, counts_as_used(self._paths, query.lineage)), seen=self.seen())

    @_alone
    def eligible(self, query: SelectionQuery) -> Eligible:
        """How much ``select_batch`` could choose from; ``refresh`` before counts what is new."""
        return eligible(self.connection, query, counts_as_used(self._paths, query.lineage))

    @_alone
    def fresh_rows(self, *, policy_version: int, limit: int) -> pa.Table:
        """At most ``limit`` complete rows of exactly this version, as a selection without groups (-1)."""
        return self._tables.chosen(
            """
            SELECT shard, row, decision_id, start_group, fork, ply, power, phase, policy_version,
                0::INTEGER AS policy_lag, checksum, "return", (-1)::INTEGER AS advantage_group
            FROM decisions WHERE policy_version = $policy_version AND status = 'complete'
            ORDER BY start_group DESC, producer, fork, ply, power, row LIMIT $limit
            """,
            {"policy_version": policy_version, "limit": limit},
        )

    @_alone
    def totals(self) -> Totals:
        """Count over everything that was taken in."""
        return self._tables.totals()

    def gather(self, selection_rows: pa.Table) -> Batch:
        """Verified arrays of a selection's, or a recorded step's, rows.

        Raises:
            DataError: a row is damaged. Its shard is set aside before, so a new selection does without it.
        """
        if (ready := self._ahead.batch_of(selection_rows)) is not None:
            return ready
        return self._gather(selection_rows)

    def look_ahead(self, query: SelectionQuery) -> None:
        """Make ready what the next step will likely ask, in another thread: take in what is new, choose, and gather.

        The next step asks all the same, of what is there by then; it is spared the work that was done already, and is handed the
        batch if it chooses the same rows. So ``query`` may be a guess, and nothing that a step trains on depends on it.
        """
        self._ahead.begin(lambda: self._likely(query))

    @_alone
    def _likely(self, query: SelectionQuery) -> tuple[pa.Table, Batch]:
        self._refresh()
        rows = self.select_batch(query).rows
        return rows, self._gather(rows)

    def _gather(self, rows: pa.Table) -> Batch:
        try:
            return gather(rows, self._open, self._buffers)
        except ShardDamaged as error:
            with self._busy:
                if error.shard not in self._intake.retired:  # else its facts are whole
                    self._intake.set_aside(error.shard, str(error))
            raise

    @_alone
    def verified_shards(self) -> list[pa.Table]:
        """The decisions of all shards taken in, mapped and verified, in the order of their names; those that are damaged, which a
        snapshot may have hidden, are set aside, so the index holds the rows of these tables and no others."""
        tables = []
        for shard in sorted(self._intake.shards):
            try:
                tables.append(open_shard(self._paths.shards / shard))
            except DataError as error:
                self._intake.take_in_tombstones()  # it may have been given up just now
                if shard not in self._intake.retired:
                    self._intake.set_aside(shard, str(error))
        return tables

    def holds(self, shard: str) -> CoveredShard | None:
        """The shard of this name, if its rows lie in ``shards/`` and were not given up."""
        return self._intake.shards.get(shard)

    @_alone
    def retired(self) -> list[CoveredShard]:
        """Shards that were given up: facts of their rows are here, tokens at most in the archive."""
        return list(self._intake.retired.values())

    @_alone
    def facts_of(self, shards: Sequence[CoveredShard]) -> IndexSnapshot:
        """What is known of these shards."""
        among_them = pc.field("shard").isin([shard.name for shard in shards])
        facts = self._tables.facts()
        decisions, plies = (table.filter(among_them) for table in (facts.decisions, facts.plies))
        return IndexSnapshot(shards=tuple(shards), decisions=decisions.combine_chunks(), plies=plies.combine_chunks())

    @_alone
    def answers(self, query: str, values: Mapping[str, object] | None = None) -> list[tuple]:
        """What a query over the tables finds."""
        return self.connection.sql(query, params=dict(values or {})).fetchall()

    @_alone
    def snapshot_if_due(self, every_shards: int) -> Path | None:
        """Write what is known to ``index/`` if enough shards came in since the snapshot before: ``every_shards``, and an eighth
        of all; 0 is never. Of older snapshots the newest one stays. For one process of a run: its trainer's."""
        new = len(self._intake.shards) - self._intake.in_snapshot
        if every_shards == 0 or new < max(every_shards, len(self._intake.shards) // 8):
            return None
        self._intake.in_snapshot = len(self._intake.shards)
        written = write_snapshot(self._paths.index, self.facts_of(list(self._intake.shards.values())))
        drop_old_snapshots(self._paths)
        return written

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
                sentence = f"Shard {shard} was given up as its rows were too old, and cannot be had from the archive: {missing}"
                raise ShardDamaged(sentence, shard) from error
