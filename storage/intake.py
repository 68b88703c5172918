"""Reads new files of a run into the tables of an index: ledgers, tombstones, the parts of a snapshot at the start, and shards.

The facts of a shard count only after the shard is verified or covered by a snapshot. A start group counts once. A damaged shard
is set aside with a sentence. A damaged ledger is an error, because it decides which rows are used.

Facts may also leave the tables: `settle` replaces those of shards that no step can reach by counts (`storage/settled.py`), once
files outside `shards/` have them. Where a record of such counts is found at the start, neither facts nor ledgers of these shards
are read. This module chooses no rows and writes nothing.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from storage.arrow_files import MappedFile
from storage.fact_tables import FactTables, ShardFacts, record_rows
from storage.facts import decision_facts, ply_facts
from storage.files import file_marks
from storage.follow import NumberedFiles, follow_folders
from storage.known_shards import KnownShards
from storage.ledger import STEP_NAME, read_ledger_file
from storage.mapped import MappedShards
from storage.parts import Parts, read_parts
from storage.ranges import Ranges
from storage.runs import RunPaths
from storage.settled import Settled, read_settled
from storage.shards import SHARD_NAME, describe_shard, map_shard, open_plies
from storage.snapshots import NO_ROWS, Coverage, CoveredShard, IndexSnapshot, read_coverage, read_snapshot
from storage.tombstones import TOMBSTONE_NAME
from telemetry.errors import DataError

_SHARDS_PER_INSERT = 256
EVERY_VERSION = 1 << 31
"""Newer than what any run reaches."""
_ROWS_BEFORE_SETTLING = 1 << 18
"""Decisions read from parts after which those out of reach leave the tables, so that memory does not follow the past."""


class Intake:
    """Fills the tables of an index; for one thread at a time.

    Attributes:
        known: the shards whose facts were read, or are counted.
        parts: the parts of the snapshot.
        settled: counts over the known shards that are not held.
        oldest: see `__init__`.
        unrecorded: shards were settled that no record in `index/` counts.
        overtaken: a new ledger names a settled shard, so the counts are wrong and the index must be opened anew.
    """

    def __init__(
        self,
        paths: RunPaths,
        tables: FactTables,
        mapped: MappedShards,
        *,
        rule: str = "",
        oldest: int | None = None,
        for_steps: bool = True,
    ) -> None:
        """Create an intake that has read nothing.

        Args:
            rule: the rule of the returns, which a record of settled shards must have; empty: no record counts.
            oldest: settle shards whose rows are all of older versions than this while the parts are read; None: none.
            for_steps: steps choose from the tables. So ledgers are read, and no shard is settled before a part covers it, because
                the process that trains writes the parts.
        """
        self.known = KnownShards()
        self.parts = Parts()
        self.settled = Settled()
        self.unrecorded = False
        self.overtaken = False
        self._paths = paths
        self._tables = tables
        self._mapped = mapped
        self._rule = rule
        self.oldest = oldest
        self._for_steps = for_steps
        self._producers: dict[str, NumberedFiles] = {}
        self._ledgers = NumberedFiles(paths.ledger, STEP_NAME, "step-{:06d}.arrow".format)
        self._recorded: Ranges | None = None
        """Steps whose ledgers were read or are counted; None before the first refresh."""
        self._tombstones = NumberedFiles(paths.retired, TOMBSTONE_NAME, "snap-{:06d}.parquet".format)
        self._covered = self._opened = False

    def refresh(self, *, listed: bool = False) -> int:
        """Take in what is new; returns the number of new decisions. `listed`: see `Index.refresh`."""
        new_rows = 0
        if not self._covered:
            self._read_coverage()
            self._covered = True
            new_rows += self.settled.decisions
        if self._for_steps:
            self._take_in_ledgers()
        new_rows += self.take_in_tombstones()
        new_rows += 0 if self._opened else self._take_in_parts()
        self._opened = True
        waiting: list[ShardFacts] = []
        follow_folders(self._paths.shards, self._producers, SHARD_NAME, "{:06d}.arrow")
        for producer, files in self._producers.items():
            if listed:
                files.list_again()
            for number, path in files.new_files():
                name = f"{producer}/{path.name}"
                if known := self.known.get(name):  # from a snapshot or a tombstone
                    files.skip_covered(number, known.next_start_group)
                    continue
                try:
                    shard, facts = self._facts_of(producer, path)
                except DataError as error:
                    new_rows += self.take_in_tombstones()  # it may have been retired just now
                    if name not in self.known.retired:
                        self._refuse(name, str(error))
                        files.list_again()
                    continue
                self.known.add(shard, held=True, loose=True)
                files.skip_covered(number, shard.next_start_group)
                waiting.append(facts)
                new_rows += facts.decisions.num_rows
                if len(waiting) == _SHARDS_PER_INSERT:
                    self._tables.add_shards(waiting)
                    waiting = []
        self._tables.add_shards(waiting)
        return new_rows

    def settle(self, oldest: int, *, at_once: bool = False) -> None:
        """Replace the facts of held shards whose rows are all older than version `oldest` by counts.

        Nothing is done before they are half of the held shards, so each row is moved once or twice.

        Args:
            at_once: however few they are; what ledgers recorded of them then stays in the tables until the next call without it.
        """
        held, stays = self.known.held, self.known.loose if self._for_steps else {}
        going = [shard for shard in held.values() if shard.newest_version < oldest and shard.name not in stays]
        if not going or (len(going) * 2 < len(held) and not at_once):
            return
        self._tables.settle([shard.name for shard in going], self.settled)
        self.settled.add(going, oldest)
        for shard in going:
            del held[shard.name]
        self.unrecorded = True
        if not at_once:
            self._close_ledgers()

    def _close_ledgers(self) -> None:
        """Count the ledgers read so far with the settled shards; those that name no other shard need not be read again."""
        self._tables.drop_settled_records()
        self.settled.ledgers = Ranges(self._recorded.as_lists() if self._recorded is not None else ())
        self.settled.still_open = self._tables.open_ledgers()

    def facts_of(self, shards: Sequence[CoveredShard]) -> IndexSnapshot:
        """The facts of live shards, without returns: from the tables, or for settled ones from their verified files.

        Settled shards whose file is damaged are left out.
        """
        whole = [shard for shard in shards if shard.name in self.known.held]
        found = [self._tables.facts([shard.name for shard in whole])]
        for shard in shards:
            if shard.name not in self.known.held:
                try:
                    found.append(self._read_shard(shard.producer, self._paths.shards / shard.name)[1])
                except DataError:
                    continue
                whole.append(shard)
        return IndexSnapshot(
            shards=tuple(whole),
            decisions=pa.concat_tables([facts.decisions for facts in found]),
            plies=pa.concat_tables([facts.plies for facts in found]),
        )

    def set_aside(self, shard: str, sentence: str) -> None:
        """Delete the facts of a damaged shard. The counts of a settled one stay."""
        self._tables.drop_shard(shard)
        if shard not in self.known.loose:
            self.parts.spoiled.add(shard)
        self._refuse(shard, sentence)

    def _refuse(self, name: str, sentence: str) -> None:
        self._mapped.drop(name)
        self.known.forget(name)
        self._tables.refuse(name, sentence)

    def take_in_tombstones(self) -> int:
        """Mark retired shards and keep the facts of their rows; returns the number of rows that were not known before."""
        new_rows = 0
        for _, path in self._tombstones.new_files():
            try:
                # The facts of settled shards are not needed, so that a tombstone of nothing else is not read further.
                shards = read_coverage(path).shards
                facts = (
                    read_snapshot(path) if not shards or any(not self.known.is_settled(shard.name) for shard in shards) else None
                )
            except DataError as error:
                self._tables.refuse(f"{path.parent.name}/{path.name}", str(error))
                continue
            shards = shards if facts is None else facts.shards
            unknown = [shard for shard in shards if self.known.get(shard.name) is None]
            if facts is not None and unknown:
                new_rows += self._add(facts, unknown, retired=True)
            for shard in shards:
                self.known.retire(shard)
                self._mapped.drop(shard.name)
        return new_rows

    def _read_coverage(self) -> None:
        """Read what the parts cover and, if shards may be settled, take over a record of settled shards that still holds."""
        self.parts.covered, damaged = read_parts(self._paths.index)
        for path, sentence in damaged:
            self._refuse(f"{path.parent.name}/{path.name}", sentence)
        if self.oldest is None or not self._rule:
            return
        if (record := read_settled(self._paths.index, self._rule, self.oldest)) is None:
            return
        found: dict[str, tuple[CoveredShard, bool]] = {}  # name -> shard, and whether it is retired
        for _, path in NumberedFiles(self._paths.retired, TOMBSTONE_NAME, "snap-{:06d}.parquet".format).new_files():
            try:
                found |= {shard.name: (shard, True) for shard in read_coverage(path).shards}
            except DataError:
                continue  # it is named when its turn comes
        folder = str(self._paths.shards)
        for part in self.parts.covered:
            for shard in part.shards:
                if shard.name not in found and shard.still_there(folder):
                    found[shard.name] = shard, False
        members = record.members(shard for shard, _ in found.values())
        if members is None:
            return
        self.settled = record
        for shard in members:
            self.known.add(shard, held=False, retired=found[shard.name][1])

    def _take_in_ledgers(self) -> None:
        counted = self.settled.ledgers
        if self._recorded is None:
            self._recorded = Ranges(counted.as_lists())
            steps = (step for first, after in counted.as_lists() for step in range(first, after))
            self._ledgers.pass_over(step for step in steps if step not in self.settled.still_open)
        waiting: list[pa.Table] = []
        try:
            for step, path in self._ledgers.new_files():
                try:
                    record = record_rows(step, read_ledger_file(path))
                except DataError:
                    self._ledgers.retry(step)  # else the next refresh would treat its rows as unused
                    raise
                self._recorded.add(step, step + 1)
                gone = [shard for shard in record["shard"].unique().to_pylist() if self.known.is_settled(shard)]
                if step not in counted:
                    self.overtaken |= bool(gone)
                waiting.append(record.filter(~pc.field("shard").isin(gone)) if gone else record)
        finally:  # the ledgers before it are not returned again
            self._tables.add_records(waiting)

    def _take_in_parts(self) -> int:
        """Load the facts of the parts for the shards that still exist; other shards are read one by one.

        Older parts come first: their facts leave the tables again before those that stay are there, and have to be moved.
        """
        folder, used, new_rows, waiting = str(self._paths.shards), list[Coverage](), 0, 0
        settled = {name for name in self.known.live if self.known.is_settled(name)}
        for part in self.parts.covered:
            taken_over = [shard for shard in part.shards if shard.name in settled and self.known.live[shard.name] == shard]
            settled.difference_update(shard.name for shard in taken_over)
            wanted = [shard for shard in part.shards if self.known.get(shard.name) is None and shard.still_there(folder)]
            if wanted:
                try:
                    facts = read_snapshot(part.path)
                except FileNotFoundError:
                    continue  # it was merged meanwhile: its shards are read
                except DataError as error:
                    self._refuse(f"{part.path.parent.name}/{part.path.name}", str(error))
                    continue
                names = {shard.name for shard in wanted}
                wanted = [shard for shard in facts.shards if shard.name in names]
                taken = self._add(facts, wanted)
                new_rows, waiting = new_rows + taken, waiting + taken
            if wanted or taken_over:
                used.append(replace(part, shards=(*wanted, *taken_over)))
            else:
                self.parts.unused.append(part.path)
            if waiting >= _ROWS_BEFORE_SETTLING and self.oldest is not None:
                self.settle(self.oldest, at_once=True)
                waiting = 0
        self.parts.covered = used
        if self.oldest is not None:
            self.settle(self.oldest)
            if self.unrecorded:
                self._close_ledgers()
        return new_rows

    def _add(self, facts: IndexSnapshot, shards: Sequence[CoveredShard], *, retired: bool = False) -> int:
        """Add the facts of some shards of a snapshot to the tables."""
        for shard in shards:
            self.known.add(shard, held=True, retired=retired)
        part = facts.subset(shards)
        self._tables.add_shards([ShardFacts(decisions=part.decisions, plies=part.plies)])
        return part.decisions.num_rows

    def _facts_of(self, producer: str, path: Path) -> tuple[CoveredShard, ShardFacts]:
        """Verify a shard and its plies and return their facts.

        Raises:
            DataError: one of them is damaged, or repeats a start group.
        """
        shard, facts, file = self._read_shard(producer, path)
        if (twice := self.known.repeated(shard)) is not None:
            raise DataError(f"{path} repeats start group {twice} of another shard; remove one of the two.")
        self._mapped.keep(shard.name, file)
        return shard, facts

    @staticmethod
    def _read_shard(producer: str, path: Path) -> tuple[CoveredShard, ShardFacts, MappedFile]:
        marks = file_marks(path) or (0, 0)  # read first: a file that replaces this one later has other marks
        file = map_shard(path)
        decisions = file.table
        shard = describe_shard(path, decisions, already=True)
        plies = open_plies(path, decisions)
        covered = CoveredShard(
            producer=producer,
            number=(number := int(path.stem)),
            next_start_group=max(shard.next_start_group, number + 1),
            start_groups=shard.start_groups,
            size=marks[0],
            written_ns=marks[1],
            newest_version=decisions["policy_version"].to_numpy().max().item() if decisions.num_rows else NO_ROWS,
        )
        facts = ShardFacts(
            decisions=decision_facts(decisions, producer, covered.name), plies=ply_facts(plies, producer, covered.name)
        )
        return covered, facts, file
