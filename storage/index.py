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

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from storage.archive import archived
from storage.arrow_files import read_arrow
from storage.fact_tables import FactTables, ShardFacts, record_rows
from storage.facts import decision_facts, ply_facts
from storage.follow import NumberedFiles, follow_folders
from storage.gather import Batch, gather
from storage.ledger import ROWS_SCHEMA, STEP_NAME
from storage.lineages import counts_as_used
from storage.look_ahead import LookAhead
from storage.mapped import MappedShard, MappedShards, ShardDamaged
from storage.packing import PackingBuffers
from storage.runs import RunPaths
from storage.schema import WEIGHTS
from storage.selection import Selection, SelectionQuery, select
from storage.shards import SHARD_NAME, describe_shard, map_shard, open_plies, open_shard
from storage.snapshots import CoveredShard, IndexSnapshot, drop_old_snapshots, file_marks, newest_snapshot, write_snapshot
from storage.tombstones import Tombstones
from storage.totals import Totals
from telemetry.errors import DataError, InputError

_LOADED_TOGETHER = 256  # shards inserted by one statement


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

    def __init__(self, paths: RunPaths, *, blend: Mapping[str, float] | None = None, discount: float = 1.0) -> None:
        weights = {"centres_gained": 1.0} if blend is None else dict(blend)
        if unknown := sorted(set(weights) - set(WEIGHTS)):
            raise InputError(f"The blend weighs {', '.join(unknown)}; known components are {', '.join(WEIGHTS)}.")
        self._paths = paths
        self._tables = FactTables({name: float(weight) for name, weight in weights.items()}, float(discount))
        self._producers: dict[str, NumberedFiles] = {}
        self._lineages: dict[str, NumberedFiles] = {}
        self._known_groups: dict[str, set[int]] = {}
        self._taken_in: dict[str, CoveredShard] = {}
        self._tombstones = Tombstones(paths)
        self._retired: dict[str, CoveredShard] = {}
        self._in_snapshot = 0
        self._opened = False
        self._mapped = MappedShards(paths.shards)
        self._buffers = PackingBuffers()
        self._ahead = LookAhead()
        self._busy = threading.RLock()
        self.connection = self._tables.connection

    def refresh(self) -> int:
        """Take in new shards and ledger records; returns the number of new decisions."""
        self._ahead.settle()  # so that nothing is taken in behind the back of whoever chooses now
        return self._refresh()

    @_alone
    def _refresh(self) -> int:
        self._take_in_ledgers()
        new_rows = self._take_in_tombstones()
        new_rows += 0 if self._opened else self._take_in_snapshot()
        self._opened = True
        waiting: list[ShardFacts] = []
        follow_folders(self._paths.shards, self._producers, SHARD_NAME, "{:06d}.arrow")
        for producer, files in self._producers.items():
            for number, path in files.arrivals():
                name = f"{producer}/{path.name}"
                if known := self._taken_in.get(name) or self._retired.get(name):  # from a snapshot or a tombstone
                    files.covers(number, known.next_start_group)
                    continue
                try:
                    facts = self._facts_of(producer, number, path)
                except DataError as error:
                    new_rows += self._take_in_tombstones()  # it may have been given up just now
                    if name not in self._retired:
                        self._refuse(name, str(error))
                        files.lost_track()
                    continue
                files.covers(number, self._taken_in[name].next_start_group)
                waiting.append(facts)
                new_rows += facts.decisions.num_rows
                if len(waiting) == _LOADED_TOGETHER:
                    self._tables.add_shards(waiting)
                    waiting = []
        self._tables.add_shards(waiting)
        return new_rows

    @property
    @_alone
    def refused(self) -> list[tuple[str, str]]:
        """Shards and snapshots set aside, each with the sentence that says why."""
        return self._tables.refused()

    @_alone
    def seen(self) -> str:
        """The start groups that were looked at, as JSON: producer -> [first, after the last] of each stretch of shards."""
        spans: dict[str, list[list[int]]] = {}
        known = [*self._taken_in.values(), *self._retired.values()]
        for shard in sorted(known, key=lambda shard: (shard.producer, shard.number)):
            stretches = spans.setdefault(shard.producer, [])
            if stretches and stretches[-1][1] == shard.number:
                stretches[-1][1] = shard.next_start_group
            else:
                stretches.append([shard.number, shard.next_start_group])
        return json.dumps(spans, separators=(",", ":"))

    @_alone
    def select_batch(self, query: SelectionQuery) -> Selection:
        """Rows for one step by the contract in ``select_batch.sql``; ``refresh`` before shows what is new."""
        return select(self.connection, query, counts_as_used(self._paths, query.lineage))

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
            if error.shard in self._retired:
                raise  # its facts are whole
            self._set_aside(error.shard, str(error))
            raise

    @_alone
    def verified_shards(self) -> list[pa.Table]:
        """The decisions of all shards taken in, mapped and verified, in the order of their names; those that are damaged, which a
        snapshot may have hidden, are set aside, so the index holds the rows of these tables and no others."""
        tables = []
        for shard in sorted(self._taken_in):
            try:
                tables.append(open_shard(self._paths.shards / shard))
            except DataError as error:
                self._take_in_tombstones()  # it may have been given up just now
                if shard not in self._retired:
                    self._set_aside(shard, str(error))
        return tables

    def holds(self, shard: str) -> CoveredShard | None:
        """The shard of this name, if its rows lie in ``shards/`` and were not given up."""
        return self._taken_in.get(shard)

    @_alone
    def retired(self) -> list[CoveredShard]:
        """Shards that were given up: facts of their rows are here, tokens at most in the archive."""
        return list(self._retired.values())

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
        new = len(self._taken_in) - self._in_snapshot
        if every_shards == 0 or new < max(every_shards, len(self._taken_in) // 8):
            return None
        self._in_snapshot = len(self._taken_in)
        written = write_snapshot(self._paths.index, self.facts_of(list(self._taken_in.values())))
        drop_old_snapshots(self._paths)
        return written

    def _take_in_ledgers(self) -> None:
        follow_folders(self._paths.ledger, self._lineages, STEP_NAME, "step-{:06d}.arrow")
        waiting: list[pa.Table] = []
        try:
            for lineage, files in self._lineages.items():
                for step, path in files.arrivals():
                    try:
                        waiting.append(record_rows(lineage, step, read_arrow(path, ROWS_SCHEMA)))
                    except DataError:
                        files.put_back(step)  # or the next refresh would take its rows for unused
                        raise
        finally:  # as those before it are not met again
            self._tables.add_records(waiting)

    def _take_in_snapshot(self) -> int:
        """Begin with what a snapshot knows of the shards that are still there; the others come in as if there were none."""
        found, passed_over = newest_snapshot(self._paths)
        for path, sentence in passed_over:
            self._refuse(f"{path.parent.name}/{path.name}", sentence)
        if found is None:
            return 0
        there = [s for s in found.shards if s.name not in self._retired and s.still_there(self._paths)]
        part = found.only(there)
        for shard in part.shards:
            self._taken_in[shard.name] = shard
            self._known_groups.setdefault(shard.producer, set()).update(shard.start_groups)
        self._in_snapshot = len(part.shards)
        if part.shards:
            self._tables.add_shards([ShardFacts(decisions=part.decisions, plies=part.plies)])
        return part.decisions.num_rows

    def _take_in_tombstones(self) -> int:
        """Know which shards were given up, and keep the facts of their rows; returns how many rows were not known before."""
        found, damaged = self._tombstones.arrivals()
        for path, sentence in damaged:
            self._tables.refuse(f"{path.parent.name}/{path.name}", sentence)
        new_rows = 0
        for tombstone in found:
            unknown = [shard for shard in tombstone.shards if shard.name not in self._taken_in | self._retired]
            for shard in tombstone.shards:
                self._in_snapshot -= self._taken_in.pop(shard.name, None) is not None and self._in_snapshot > 0
                self._mapped.drop(shard.name)
                self._retired[shard.name] = shard
                self._known_groups.setdefault(shard.producer, set()).update(shard.start_groups)
            if unknown:
                part = tombstone.only(unknown)
                self._tables.add_shards([ShardFacts(decisions=part.decisions, plies=part.plies)])
                new_rows += part.decisions.num_rows
        return new_rows

    def _open(self, shard: str) -> MappedShard:
        try:
            return self._mapped.get(shard)
        except ShardDamaged as error:
            self._take_in_tombstones()
            if shard not in self._retired:
                raise
            try:
                return MappedShard(shard, archived(self._paths, shard))
            except DataError as missing:
                sentence = f"Shard {shard} was given up as its rows were too old, and cannot be had from the archive: {missing}"
                raise ShardDamaged(sentence, shard) from error

    def _facts_of(self, producer: str, number: int, path: Path) -> ShardFacts:
        """Verify a shard and its plies and take their facts; DataError if either cannot be relied on."""
        marks = file_marks(path) or (0, 0)  # before it is read: another file under its name would have others
        file = map_shard(path)
        decisions = file.table
        shard = describe_shard(path, decisions, already=True)
        known = self._known_groups.setdefault(producer, set())
        if twice := known.intersection(shard.start_groups):
            raise DataError(f"{path} repeats start group {min(twice)} of another shard; remove one of the two.")
        plies = open_plies(path, decisions)
        known.update(shard.start_groups)
        name = f"{producer}/{path.name}"
        self._mapped.keep(name, file)
        self._taken_in[name] = CoveredShard(
            producer=producer,
            number=number,
            next_start_group=max(shard.next_start_group, number + 1),
            start_groups=shard.start_groups,
            size=marks[0],
            written_ns=marks[1],
        )
        return ShardFacts(decisions=decision_facts(decisions, producer, name), plies=ply_facts(plies, producer, name))

    @_alone
    def _set_aside(self, shard: str, sentence: str) -> None:
        self._tables.drop_shard(shard)
        self._refuse(shard, sentence)

    def _refuse(self, shard: str, sentence: str) -> None:
        self._mapped.drop(shard)
        self._taken_in.pop(shard, None)
        self._tables.refuse(shard, sentence)
