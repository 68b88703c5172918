"""Reads new files of a run into the tables of an index: ledgers, tombstones, one snapshot at the start, and shards.

The facts of a shard count only after the shard is verified or covered by a snapshot. A start group counts once. A damaged shard
is set aside with a sentence. A damaged ledger is an error, because it decides which rows are used. This module chooses no rows
and writes nothing.
"""

import json
from pathlib import Path

import pyarrow as pa

from storage.fact_tables import FactTables, ShardFacts, record_rows
from storage.facts import decision_facts, ply_facts
from storage.follow import NumberedFiles, follow_folders
from storage.ledger import STEP_NAME, read_ledger_file
from storage.mapped import MappedShards
from storage.runs import RunPaths
from storage.shards import SHARD_NAME, describe_shard, map_shard, open_plies
from storage.snapshots import CoveredShard, file_marks, newest_snapshot
from storage.tombstones import Tombstones
from telemetry.errors import DataError

_SHARDS_PER_INSERT = 256


class Intake:
    """Fills the tables of an index; for one thread at a time.

    Attributes:
        shards: shards in the tables whose files are in `shards/`, by name.
        retired: retired shards, whose facts are kept.
        in_snapshot: how many of `shards` the newest snapshot that this index read or wrote covers.
    """

    def __init__(self, paths: RunPaths, tables: FactTables, mapped: MappedShards) -> None:
        self.shards: dict[str, CoveredShard] = {}
        self.retired: dict[str, CoveredShard] = {}
        self.in_snapshot = 0
        self._paths = paths
        self._tables = tables
        self._mapped = mapped
        self._producers: dict[str, NumberedFiles] = {}
        self._lineages: dict[str, NumberedFiles] = {}
        self._known_groups: dict[str, set[int]] = {}
        self._tombstones = Tombstones(paths)
        self._opened = False

    def refresh(self, *, listed: bool = False) -> int:
        """Take in what is new; returns the number of new decisions. `listed`: see `Index.refresh`."""
        self._take_in_ledgers()
        new_rows = self.take_in_tombstones()
        new_rows += 0 if self._opened else self._take_in_snapshot()
        self._opened = True
        waiting: list[ShardFacts] = []
        follow_folders(self._paths.shards, self._producers, SHARD_NAME, "{:06d}.arrow")
        for producer, files in self._producers.items():
            if listed:
                files.list_again()
            for number, path in files.new_files():
                name = f"{producer}/{path.name}"
                if known := self.shards.get(name) or self.retired.get(name):  # from a snapshot or a tombstone
                    files.skip_covered(number, known.next_start_group)
                    continue
                try:
                    facts = self._facts_of(producer, number, path)
                except DataError as error:
                    new_rows += self.take_in_tombstones()  # it may have been retired just now
                    if name not in self.retired:
                        self._refuse(name, str(error))
                        files.list_again()
                    continue
                files.skip_covered(number, self.shards[name].next_start_group)
                waiting.append(facts)
                new_rows += facts.decisions.num_rows
                if len(waiting) == _SHARDS_PER_INSERT:
                    self._tables.add_shards(waiting)
                    waiting = []
        self._tables.add_shards(waiting)
        return new_rows

    def seen(self) -> str:
        """The start groups of all shards read, as JSON: producer -> [first, one after the last] of each range."""
        spans: dict[str, list[list[int]]] = {}
        known = [*self.shards.values(), *self.retired.values()]
        for shard in sorted(known, key=lambda shard: (shard.producer, shard.number)):
            stretches = spans.setdefault(shard.producer, [])
            if stretches and stretches[-1][1] == shard.number:
                stretches[-1][1] = shard.next_start_group
            else:
                stretches.append([shard.number, shard.next_start_group])
        return json.dumps(spans, separators=(",", ":"))

    def set_aside(self, shard: str, sentence: str) -> None:
        """Delete the rows of a damaged shard."""
        self._tables.drop_shard(shard)
        self._refuse(shard, sentence)

    def _refuse(self, shard: str, sentence: str) -> None:
        self._mapped.drop(shard)
        self.shards.pop(shard, None)
        self._tables.refuse(shard, sentence)

    def take_in_tombstones(self) -> int:
        """Mark retired shards and keep the facts of their rows; returns the number of rows that were not known before."""
        found, damaged = self._tombstones.read_new()
        for path, sentence in damaged:
            self._tables.refuse(f"{path.parent.name}/{path.name}", sentence)
        new_rows = 0
        for tombstone in found:
            known = self.shards.keys() | self.retired.keys()
            unknown = [shard for shard in tombstone.shards if shard.name not in known]
            for shard in tombstone.shards:
                self.in_snapshot -= self.shards.pop(shard.name, None) is not None and self.in_snapshot > 0
                self._mapped.drop(shard.name)
                self.retired[shard.name] = shard
                self._known_groups.setdefault(shard.producer, set()).update(shard.start_groups)
            if unknown:
                part = tombstone.subset(unknown)
                self._tables.add_shards([ShardFacts(decisions=part.decisions, plies=part.plies)])
                new_rows += part.decisions.num_rows
        return new_rows

    def _take_in_ledgers(self) -> None:
        follow_folders(self._paths.ledger, self._lineages, STEP_NAME, "step-{:06d}.arrow")
        waiting: list[pa.Table] = []
        try:
            for lineage, files in self._lineages.items():
                for step, path in files.new_files():
                    try:
                        waiting.append(record_rows(lineage, step, read_ledger_file(path)))
                    except DataError:
                        files.retry(step)  # else the next refresh would treat its rows as unused
                        raise
        finally:  # the ledgers before it are not returned again
            self._tables.add_records(waiting)

    def _take_in_snapshot(self) -> int:
        """Load the facts of a snapshot for the shards that still exist; other shards are read one by one."""
        found, passed_over = newest_snapshot(self._paths)
        for path, sentence in passed_over:
            self._refuse(f"{path.parent.name}/{path.name}", sentence)
        if found is None:
            return 0
        folder = str(self._paths.shards)
        there = [shard for shard in found.shards if shard.name not in self.retired and shard.still_there(folder)]
        part = found.subset(there)
        for shard in part.shards:
            self.shards[shard.name] = shard
            self._known_groups.setdefault(shard.producer, set()).update(shard.start_groups)
        self.in_snapshot = len(part.shards)
        if part.shards:
            self._tables.add_shards([ShardFacts(decisions=part.decisions, plies=part.plies)])
        return part.decisions.num_rows

    def _facts_of(self, producer: str, number: int, path: Path) -> ShardFacts:
        """Verify a shard and its plies and return their facts.

        Raises:
            DataError: one of them is damaged, or repeats a start group.
        """
        marks = file_marks(path) or (0, 0)  # read first: a file that replaces this one later has other marks
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
        self.shards[name] = CoveredShard(
            producer=producer,
            number=number,
            next_start_group=max(shard.next_start_group, number + 1),
            start_groups=shard.start_groups,
            size=marks[0],
            written_ns=marks[1],
        )
        return ShardFacts(decisions=decision_facts(decisions, producer, name), plies=ply_facts(plies, producer, name))
