"""The index of a run: an in-memory DuckDB with the facts of its rows, without tokens.

Shards and ledgers are the truth. Any process may build its own index at any time, without locks, while others write. A trainer's
index holds the shards within its staleness budget: their metadata name their newest policy version, older ones are not read, and
a shard whose rows have all become too old leaves. Without `oldest` an index holds every shard, as for a query over the run.

Every byte of a shard and of its plies is verified when its facts are read, and again when rows are gathered from it. A damaged
shard is set aside with a sentence (`refused`). A damaged ledger is an error, because it decides which rows are used. Selection is
deterministic: it depends on the held shards, the ledgers and the query.

DuckDB neither holds nor returns token lists, and nothing here writes into the run. An index is for one thread at a time.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa

from entente.telemetry.errors import DataError
from storage.fact_tables import FactTables, ShardFacts, facts_of, record_rows
from storage.gather import Batch, gather
from storage.ledger import ROWS_SCHEMA, Eligible, ledger_path, read_ledger_file, recorded_steps
from storage.mapped import MappedShards, ShardDamaged
from storage.rewards import check_blend
from storage.runs import RunPaths
from storage.selection import Selection, SelectionQuery, eligible, make_standings, select
from storage.shards import NO_ROWS, Shard, describe_shard, map_shard, open_plies, read_shard_metadata, shard_names

_SHARDS_PER_INSERT = 256
"""An insert costs more than its rows."""


class Index:
    """One process's view of a run; `refresh` adds what was published since.

    Attributes:
        connection: the tables, see `storage/fact_tables.py`.
        newest_versions: newest policy version of each shard that was met, by name; also of those that left or were not read.
        rows: with `keep_rows`, the mapped decisions of the held shards, by name.
    """

    def __init__(
        self,
        paths: RunPaths,
        *,
        blend: Mapping[str, float] | None = None,
        discount: float = 1.0,
        threads: int = 1,
        oldest: int | None = None,
        only: Collection[str] | None = None,
        keep_rows: bool = False,
    ) -> None:
        """Create an empty index; `refresh` fills it.

        Args:
            blend: weight of each reward component in a decision's return; None: centres alone.
            discount: factor per later decision of the same power in the fork.
            threads: threads of DuckDB; 0: one per core. With more than one, DuckDB's idle threads make the allocator return the
                free memory of the whole process several times a second. A trainer then spent a tenth of its CPU time on getting
                its activations' pages back from the kernel.
            oldest: hold only shards with a row of this policy version or a newer one. Each query raises it to the oldest version
                that it reaches. None: hold every shard.
            only: names of the shards to hold; None: those in the folder.
            keep_rows: keep the decisions of held shards mapped.

        Raises:
            InputError: the blend names an unknown component.
        """
        weights = {"centres_gained": 1.0} if blend is None else {name: float(weight) for name, weight in blend.items()}
        check_blend(weights)
        self._paths, self._oldest, self._only = paths, oldest, only
        self._tables = FactTables(weights, float(discount), threads)
        self._mapped = MappedShards(paths.shards)
        self._held: dict[str, Shard] = {}
        self._steps: set[int] = set()
        self._left: Counter[str] = Counter()
        """Advantage groups that left, by their last standing; `expired_with_spread` are part of `expired`."""
        self._keep_rows = keep_rows
        self.rows: dict[str, pa.Table] = {}
        self.newest_versions: dict[str, int] = {}
        self.connection = self._tables.connection

    def refresh(self) -> int:
        """Take in new ledgers and shards; returns the number of new decisions."""
        self._read_ledgers()
        names = shard_names(self._paths) if self._only is None else sorted(self._only)
        new = [name for name in names if name not in self.newest_versions]
        new_rows = 0
        for first in range(0, len(new), _SHARDS_PER_INSERT):
            found = [self._read_shard(name) for name in new[first : first + _SHARDS_PER_INSERT]]
            facts = [each for each in found if each is not None]
            self._tables.add_shards(facts)
            new_rows += sum(each.decisions.num_rows for each in facts)
        return new_rows

    def _read_ledgers(self) -> None:
        """Read the new ledgers that can name a held shard: step s trains on versions below s."""
        first = 0 if self._oldest is None else self._oldest + 1
        new = [step for step in recorded_steps(self._paths) if step >= first]
        for step in sorted(set(new) - self._steps):
            self._tables.add_record(record_rows(step, read_ledger_file(ledger_path(self._paths, step))))
            self._steps.add(step)

    def _read_shard(self, name: str) -> ShardFacts | None:
        """Verify a shard and its plies, and return their facts; None if it is too old, damaged, or just removed."""
        path = self._paths.shards / name
        self.newest_versions[name] = NO_ROWS
        try:
            if self._oldest is not None:
                self.newest_versions[name] = read_shard_metadata(path).newest_version
                if self.newest_versions[name] < self._oldest:
                    return None
            file = map_shard(path)
            shard, plies = describe_shard(path, file.table, already=True), open_plies(path, file.table)
            self._refuse_repeated(shard)
        except DataError as error:
            if self._only is not None or path.exists():
                self._tables.refuse(name, str(error))
            return None
        self._held[name] = shard
        self.newest_versions[name] = shard.newest_version
        self._mapped.keep(name, file)
        if self._keep_rows:
            self.rows[name] = file.table
        return facts_of(name, shard.producer, file.table, plies)

    def _refuse_repeated(self, shard: Shard) -> None:
        """Raise a DataError if another held shard has one of its start groups."""
        for other in self._held.values():
            if other.producer == shard.producer and (twice := set(other.start_groups) & set(shard.start_groups)):
                raise DataError(f"{shard.path} repeats start group {min(twice)} of another shard; remove one of the two.")

    def _set_aside(self, name: str, sentence: str) -> None:
        """Delete the facts of a damaged shard."""
        self._forget([name])
        self._tables.drop([name])
        self._tables.refuse(name, sentence)

    def _forget(self, names: Collection[str]) -> None:
        for name in names:
            self._held.pop(name, None)
            self.rows.pop(name, None)
            self._mapped.drop(name)

    @property
    def refused(self) -> list[tuple[str, str]]:
        """Shards that were set aside, each with the reason."""
        return self._tables.refused()

    def select_batch(self, query: SelectionQuery) -> Selection:
        """Rows for one step, as `select_batch.sql` defines them. Call `refresh` first to include new shards."""
        self._judge(query)
        return select(self.connection, query, self._left)

    def eligible(self, query: SelectionQuery) -> Eligible:
        """How much `select_batch` could choose from. Call `refresh` first to include new shards."""
        self._judge(query)
        return eligible(self.connection, query, self._left)

    def _judge(self, query: SelectionQuery) -> None:
        """Make the table `standings`; then shards that are too old for this query and any later one leave."""
        make_standings(self.connection, query)
        if self._oldest is None:
            return
        self._oldest = max(self._oldest, query.policy_version - query.max_policy_lag)
        going = [name for name, shard in self._held.items() if shard.newest_version < self._oldest]
        if going:
            self._left += self._tables.drop_expired(going)
            self._forget(going)

    def fresh_rows(self, *, policy_version: int, limit: int) -> pa.Table:
        """At most `limit` complete rows of exactly this version, as a selection without advantage groups (-1)."""
        query = """
            SELECT shard, row, decision_id, start_group, fork, ply, power, phase, policy_version,
                0::INTEGER AS policy_lag, checksum, "return", (-1)::INTEGER AS advantage_group
            FROM decisions WHERE policy_version = $policy_version AND status = 'complete'
            ORDER BY start_group DESC, producer, fork, ply, power, row LIMIT $limit
        """
        found = self.connection.sql(query, params={"policy_version": policy_version, "limit": limit})
        return found.to_arrow_table().cast(ROWS_SCHEMA).combine_chunks()

    def gather(self, rows: pa.Table) -> Batch:
        """Verified arrays of the rows of a selection or of a recorded step, also of shards that are not held.

        Raises:
            ShardDamaged: a row is damaged. Its shard was set aside, so a new selection does not use it.
        """
        try:
            return gather(rows, self._mapped.get)
        except ShardDamaged as error:
            self._set_aside(error.shard, str(error))
            raise

    def fetch(self, query: str, values: Mapping[str, object] | None = None) -> list[tuple]:
        """The rows of a query over the tables."""
        return self.connection.sql(query, params=dict(values or {})).fetchall()


def open_index(paths: RunPaths, **how: Any) -> Index:
    """An index that knows the files of a run as they are now; arguments as for `Index`."""
    index = Index(paths, **how)
    index.refresh()
    return index
