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
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import pyarrow as pa

from storage.arrow_files import read_arrow
from storage.fact_tables import FactTables, ShardFacts, record_rows
from storage.facts import decision_facts, ply_facts
from storage.follow import NumberedFiles, follow_folders
from storage.gather import Batch, gather
from storage.ledger import ROWS_SCHEMA, STEP_NAME
from storage.lineages import counts_as_used
from storage.look_ahead import LookAhead
from storage.mapped import MappedShards, ShardDamaged
from storage.packing import PackingBuffers
from storage.runs import RunPaths
from storage.schema import WEIGHTS
from storage.selection import Selection, SelectionQuery, select
from storage.shards import SHARD_NAME, describe_shard, map_shard, open_plies, open_shard
from storage.snapshots import CoveredShard, IndexSnapshot, drop_old_snapshots, file_marks, newest_snapshot, write_snapshot
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
        new_rows = 0 if self._opened else self._take_in_snapshot()
        self._opened = True
        waiting: list[ShardFacts] = []
        follow_folders(self._paths.shards, self._producers, SHARD_NAME, "{:06d}.arrow")
        for producer, files in self._producers.items():
            for number, path in files.arrivals():
                name = f"{producer}/{path.name}"
                if name in self._taken_in:  # from the snapshot
                    files.covers(number, self._taken_in[name].next_start_group)
                    continue
                try:
                    facts = self._facts_of(producer, number, path)
                except DataError as error:
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
        for shard in sorted(self._taken_in.values(), key=lambda shard: (shard.producer, shard.number)):
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
            return gather(rows, self._mapped.get, self._buffers)
        except ShardDamaged as error:
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
                self._set_aside(shard, str(error))
        return tables

    @_alone
    def snapshot_if_due(self, every_shards: int) -> Path | None:
        """Write what is known to ``index/`` if enough shards came in since the snapshot before: ``every_shards``, and an eighth
        of all; 0 is never. Of older snapshots the newest one stays. For one process of a run: its trainer's."""
        new = len(self._taken_in) - self._in_snapshot
        if every_shards == 0 or new < max(every_shards, len(self._taken_in) // 8):
            return None
        self._in_snapshot = len(self._taken_in)
        facts = self._tables.facts()
        snapshot = IndexSnapshot(shards=tuple(self._taken_in.values()), decisions=facts.decisions, plies=facts.plies)
        written = write_snapshot(self._paths, snapshot)
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
        part = found.only([shard for shard in found.shards if shard.still_there(self._paths)])
        for shard in part.shards:
            self._taken_in[shard.name] = shard
            self._known_groups.setdefault(shard.producer, set()).update(shard.start_groups)
        self._in_snapshot = len(part.shards)
        if part.shards:
            self._tables.add_shards([ShardFacts(decisions=part.decisions, plies=part.plies)])
        return part.decisions.num_rows

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
