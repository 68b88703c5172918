"""The index of a run: an in-memory DuckDB with the facts of its rows, without tokens; and the selection of a step's rows.

Shards and ledgers are the source of truth; any process may build its own index, without locks, while others write. A trainer's
index holds only shards within its staleness budget: it skips shards whose metadata say they are too old, and drops a shard
once all its rows are. Without `oldest` it holds every shard.

Reading facts verifies every byte of a shard and its phases, and gathering verifies again. A damaged shard is set aside, with
the reason in `rejected_files`; a damaged ledger is an error, because it decides which rows are used. `select_batch.sql` defines
the selection: the same shards, ledgers, settings and step give the same rows in the same order, with any number of threads.

Tables: `decisions`, `advantage_groups`, `phases`, `batches` (what the ledgers recorded), `rejected_files`; view: `groups`. Their
columns come from an empty instance of what is inserted. DuckDB holds no token lists, nothing is written to the run, and an
index is for one thread at a time.
"""

import json
import logging
from collections import Counter
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from entente.records.rows import PlayedPhase
from entente.telemetry.errors import DataError
from storage.arrow_files import DECISION_SCHEMA, map_arrow, to_table
from storage.files import file_marks
from storage.gather import Batch, MappedShards, ShardDamaged, gather
from storage.ledger import ROWS_SCHEMA, Eligible, ledger_path, read_ledger_file, recorded_steps
from storage.own_selection import ask_for_start_groups
from storage.rewards import check_reward_weights, decision_facts, phase_facts
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.shards import NO_ROWS, Shard, describe_shard, open_phases, shard_names

logger = logging.getLogger("entente.storage")

_SHARDS_PER_INSERT = 256
"""Batched, because the overhead of an insert exceeds the cost of its rows."""
_TABLES = ("decisions", "advantage_groups", "phases", "batches")
ELIGIBILITIES = ("eligible", "used", "unusable", "ahead", "expired", "zero_std")
_SELECT_SQL = Path(__file__).with_name("select_batch.sql").read_text()
_GROUPS_SQL = Path(__file__).with_name("advantage_groups.sql").read_text()
_GROUPS_VIEW = """
CREATE VIEW "groups" AS
SELECT g.*, (
    SELECT count(DISTINCT b.step) FROM batches AS b
    WHERE b.shard = g.shard AND b.start_group = g.start_group AND b.power = g.power AND b.phase = g.phase
) AS used
FROM advantage_groups AS g
"""


class Index:
    """One process's view of a run; `refresh` adds newly published files. `newest_versions` has the newest policy version by
    shard name, also of shards that were dropped or not read; `rows`, with `keep_rows`, the mapped decisions of held shards."""

    def __init__(
        self,
        paths: RunPaths,
        storage: StorageSettings | None = None,
        *,
        seed: int = 0,
        threads: int = 1,
        oldest: int | None = None,
        only: Collection[str] | None = None,
        keep_rows: bool = False,
    ) -> None:
        """Create an empty index; `refresh` fills it. Raises InputError if `reward_weights` names an unknown component.

        Args:
            storage: how returns are computed, and what a step may train on; None: the defaults.
            seed: of the selection.
            threads: of DuckDB; 0: one per core. With more than one, DuckDB's idle threads make the allocator return the free
                memory of the whole process several times a second, and a trainer spent a tenth of its CPU time on page faults.
            oldest: hold only shards with a row of this policy version or newer; each query raises it to the oldest that it can
                use.
            only: names of the shards to hold; None: those in the folder.
            keep_rows: keep the decisions of held shards mapped.
        """
        self._storage, self._seed = storage or StorageSettings(), seed
        check_reward_weights(self._storage.reward_weights)
        self._paths, self._oldest, self._only = paths, oldest, only
        self._mapped = MappedShards(paths.shards)
        self._held: dict[str, Shard] = {}
        self._groups: dict[str, set[int]] = {}
        """Start groups of the held shards, by producer."""
        self._listed: dict[str, set[str]] = {}
        """Names of files that a refresh has listed, by producer: a long run has more than a hundred thousand."""
        self._refused: dict[str, tuple[int, int] | None] = {}
        """Marks of the files of shards that were refused, from before they were read; None: missing."""
        self._steps: set[int] = set()
        self._left: Counter[str] = Counter()
        """Advantage groups of dropped shards, by their last eligibility; `expired` includes `expired_with_range`."""
        self._keep_rows = keep_rows
        self.rows: dict[str, pa.Table] = {}
        self.newest_versions: dict[str, int] = {}
        self.connection = duckdb.connect(":memory:")
        # In a notebook without ipywidgets DuckDB has no bar, and refuses the setting.
        if self.connection.sql("SELECT current_setting('enable_progress_bar')").fetchall() != [(False,)]:
            self.connection.execute("SET enable_progress_bar = false")
        if threads:
            self.connection.execute(f"SET threads = {threads}")
        self._make_tables()

    def _make_tables(self) -> None:
        decisions, phases = self._facts("", to_table([]), to_table([], PlayedPhase))
        self._with(decisions, "CREATE TABLE decisions AS FROM given", f"CREATE TABLE advantage_groups AS {_GROUPS_SQL}")
        self._with(phases, "CREATE TABLE phases AS FROM given")
        self._with(_recorded(0, ROWS_SCHEMA.empty_table()), "CREATE TABLE batches AS FROM given")
        self.connection.execute("CREATE TABLE rejected_files (shard VARCHAR, reason VARCHAR)")
        self.connection.execute(_GROUPS_VIEW)
        self._group_eligibility, candidates, draw, self._chosen_rows = (
            statement.query for statement in self.connection.extract_statements(_SELECT_SQL)
        )
        self._set(max_policy_lag=self._storage.max_policy_lag, max_uses=self._storage.max_uses, seed=self._seed)
        self._set(step=1, policy_version=0)
        self.connection.execute(self._group_eligibility)
        self.connection.execute(candidates)
        if not self._storage.selection:
            self.connection.execute(draw)

    def _with(self, rows: pa.Table, *statements: str) -> None:
        """Run the statements with `rows` as the table `given`."""
        self.connection.register("given", rows)
        for statement in statements:
            self.connection.execute(statement)
        self.connection.unregister("given")

    def _facts(self, shard: str, decisions: pa.Table, phases: pa.Table) -> tuple[pa.Table, pa.Table]:
        return decision_facts(decisions, shard, self._storage.reward_weights, self._storage.discount), phase_facts(phases, shard)

    def refresh(self) -> int:
        """Add new ledgers and shards; returns the number of new decisions. A refused shard is new once its file is another one,
        as after its start groups were played again."""
        recorded = self._new_ledgers()  # before the shards, so that each shard that they name is there
        names = shard_names(self._paths, self._listed) if self._only is None else sorted(self._only)
        replaced = self._replaced()
        new = [name for name in names if name not in self.newest_versions] + replaced
        if replaced and self._oldest is not None:  # their rows were left out below
            recorded |= self._ledgers_again(replaced)
        new_rows = 0
        for first in range(0, len(new), _SHARDS_PER_INSERT):
            shards = [self._read_shard(name) for name in new[first : first + _SHARDS_PER_INSERT]]
            if facts := [each for each in shards if each is not None]:
                decisions, phases = (pa.concat_tables(tables) for tables in zip(*facts, strict=True))
                self._with(
                    decisions,
                    "INSERT INTO decisions BY NAME FROM given",
                    f"INSERT INTO advantage_groups BY NAME {_GROUPS_SQL}",
                )
                self._with(phases, "INSERT INTO phases BY NAME FROM given")
                new_rows += decisions.num_rows
        if recorded:
            rows = pa.concat_tables(recorded.values())
            if self._oldest is not None:  # as if this index had dropped the others itself: a resumed step counts the same
                rows = rows.filter(pc.field("shard").isin(pa.array([*self._held], pa.string())))
            self._with(rows, "INSERT INTO batches BY NAME FROM given")
            self._steps.update(recorded)
        return new_rows

    def _new_ledgers(self) -> dict[int, pa.Table]:
        """The new ledgers that can name a held shard, by step: step s trains on versions below s."""
        first = 0 if self._oldest is None else self._oldest + 1
        new = sorted(step for step in recorded_steps(self._paths) if step >= first and step not in self._steps)
        return {step: _recorded(step, read_ledger_file(ledger_path(self._paths, step))) for step in new}

    def _replaced(self) -> list[str]:
        now = {name: file_marks(self._paths.shards / name) for name in self._refused}
        found = [name for name, marks in now.items() if marks is not None and marks != self._refused[name]]
        for name in found:
            del self._refused[name]
            self.connection.execute("DELETE FROM rejected_files WHERE shard = ?", [name])
        return found

    def _ledgers_again(self, names: list[str]) -> dict[int, pa.Table]:
        """The rows of these shards in ledgers that were read before."""
        known = {step: _recorded(step, read_ledger_file(ledger_path(self._paths, step))) for step in sorted(self._steps)}
        return {step: rows.filter(pc.field("shard").isin(names)) for step, rows in known.items()}

    def _read_shard(self, name: str) -> tuple[pa.Table, pa.Table] | None:
        """Verified facts of a shard and its phases; None if it is too old, damaged, or just removed."""
        path = self._paths.shards / name
        marks, self.newest_versions[name] = file_marks(path), NO_ROWS
        try:
            if self._oldest is not None:
                self.newest_versions[name] = describe_shard(path).newest_version
                if self.newest_versions[name] < self._oldest:
                    return None
            file = map_arrow(path, DECISION_SCHEMA)
            shard, phases = describe_shard(path, file.table), open_phases(path, file.table)
            self._refuse_repeated(shard)
        except DataError as error:
            self._refused[name] = marks
            if self._only is not None or path.exists():
                self._refuse(name, str(error))
            return None
        self._held[name] = shard
        self._groups.setdefault(shard.producer, set()).update(shard.start_groups)
        self.newest_versions[name] = shard.newest_version
        self._mapped.keep(name, file)
        if self._keep_rows:
            self.rows[name] = file.table
        return self._facts(name, file.table, phases)

    def _refuse_repeated(self, shard: Shard) -> None:
        if twice := self._groups.get(shard.producer, set()).intersection(shard.start_groups):
            raise DataError(f"{shard.path} repeats start group {min(twice)} of another shard; remove one of the two.")

    def _refuse(self, name: str, sentence: str) -> None:
        self.connection.execute("INSERT INTO rejected_files VALUES (?, ?)", [name, sentence])

    @property
    def refused(self) -> list[tuple[str, str]]:
        return self.connection.sql("SELECT shard, reason FROM rejected_files ORDER BY shard").fetchall()

    def _drop(self, names: list[str]) -> None:
        """Drop the rows of these shards by rebuilding the tables, because deleted rows would stay in memory."""
        for name in names:
            if (shard := self._held.pop(name, None)) is not None:
                self._groups[shard.producer].difference_update(shard.start_groups)
            self.rows.pop(name, None)
            self._mapped.drop(name)
        for table in _TABLES:
            rest = f"FROM {table} WHERE shard NOT IN (SELECT unnest(?::VARCHAR[]))"
            self.connection.execute(f"CREATE OR REPLACE TABLE {table} AS {rest}", [names])

    def select_batch(self, step: int, *, policy_version: int, start_groups: int) -> tuple[pa.Table, dict[str, int]]:
        """Select rows for one step, at most `start_groups` groups, perhaps none; call `refresh` first to include new shards.

        Lag is counted from `policy_version`, which the trainer holds. Returns the rows in batch order, with the columns of
        `ledger.ROWS_SCHEMA` and the selection's rules as metadata; and the number of advantage groups of all shards ever held,
        by eligibility (`select_batch.sql`), where eligible = chosen + waiting; `in_budget`: those within the staleness budget
        that could be trained, or were, or have equal returns.
        """
        self.judge(step, policy_version)
        self._set(start_groups=start_groups)
        self._ask_user()
        rows = self.connection.sql(self._chosen_rows).to_arrow_table().cast(ROWS_SCHEMA).combine_chunks()
        by_eligibility = dict(self.connection.sql("SELECT eligibility, count(*) FROM group_eligibility GROUP BY ALL").fetchall())
        within = "eligibility IN ('used', 'zero_std', 'eligible') AND group_lag <= getvariable('max_policy_lag')"
        ((in_budget,),) = self.connection.sql(f"SELECT count(*) FROM group_eligibility WHERE {within}").fetchall()
        counts = {name: by_eligibility.get(name, 0) + self._left[name] for name in ELIGIBILITIES}
        chosen = len(rows["advantage_group"].unique())
        if self._storage.selection and counts["eligible"] and not chosen:
            logger.warning("storage.selection returns none of the start groups that step %d can train on", step)
        asked = {"step": step, "policy_version": policy_version, "start_groups": start_groups, "seed": self._seed}
        asked |= self._storage.model_dump(include={"max_policy_lag", "max_uses", "selection"})
        rule = {"select_batch.sql": sha256(_SELECT_SQL.encode()).hexdigest()[:16], "duckdb": duckdb.__version__}
        rows = rows.replace_schema_metadata({"selection": json.dumps(asked), **rule})
        return rows, {**counts, "in_budget": in_budget, "chosen": chosen, "waiting": counts["eligible"] - chosen}

    def eligible(self, step: int, *, policy_version: int) -> Eligible:
        """Count what `select_batch` could select; call `refresh` first to include new shards."""
        self.judge(step, policy_version)
        self._ask_user()
        counted = """
            SELECT
                count(*),
                coalesce(sum(advantage_groups), 0),
                (SELECT count(*) FROM group_eligibility WHERE eligibility = 'expired' AND has_range)
            FROM wanted
        """
        ((start_groups, advantage_groups, expired),) = self.connection.sql(counted).fetchall()
        return Eligible(
            start_groups=start_groups,
            advantage_groups=advantage_groups,
            expired=expired + self._left["expired_with_range"],
        )

    def judge(self, step: int, policy_version: int) -> None:
        """Create the table `group_eligibility`, which the view `candidates` reads, for a step of a trainer at this version.
        Then drop the shards that are too old for this step and any later one."""
        self._set(step=step, policy_version=policy_version)
        self.connection.execute(self._group_eligibility)
        if self._oldest is None:
            return
        self._oldest = max(self._oldest, policy_version - self._storage.max_policy_lag)
        going = [name for name, shard in self._held.items() if shard.newest_version < self._oldest]
        if not going:
            return
        them = "WHERE shard IN (SELECT unnest(?::VARCHAR[]))"
        counted = f"SELECT eligibility, has_range, count(*) FROM group_eligibility {them} GROUP BY ALL"
        for eligibility, has_range, groups in self.connection.execute(counted, [going]).fetchall():
            self._left[eligibility] += groups
            self._left["expired_with_range"] += groups if eligibility == "expired" and has_range else 0
        self.connection.execute(f"DELETE FROM group_eligibility {them}", [going])
        self._drop(going)

    def _ask_user(self) -> None:
        """Fill `wanted` from the user's SQL; without it, from the seeded selection."""
        if self._storage.selection:
            self.connection.register("wanted", ask_for_start_groups(self.connection, self._storage.selection))

    def _set(self, **values: int) -> None:
        for name, value in values.items():
            self.connection.execute(f"SET VARIABLE {name} = {value}")

    def fresh_rows(self, *, policy_version: int, limit: int) -> pa.Table:
        """At most `limit` complete rows of exactly this version, as a selection without advantage groups (-1)."""
        query = """
            SELECT shard, row, decision_id, start_group, fork, phase_index, power, phase, policy_version,
                0::INTEGER AS policy_lag, checksum, "return", (-1)::INTEGER AS advantage_group
            FROM decisions WHERE policy_version = $policy_version AND status = 'complete'
            ORDER BY start_group DESC, producer, fork, phase_index, power, row LIMIT $limit
        """
        rows = self.connection.sql(query, params={"policy_version": policy_version, "limit": limit})
        return rows.to_arrow_table().cast(ROWS_SCHEMA).combine_chunks()

    def gather(self, rows: pa.Table) -> Batch:
        """Verified arrays of selected or recorded rows, also of shards not held. Raises ShardDamaged if a row is damaged; its
        shard is set aside, so a new selection does not use it."""
        try:
            return gather(rows, self._mapped.get)
        except ShardDamaged as error:
            self._drop([error.shard])
            self._refused[error.shard] = file_marks(self._paths.shards / error.shard)
            self._refuse(error.shard, str(error))
            raise


def check_selection(storage: StorageSettings) -> None:
    """Check that the SQL of `storage.selection` runs, on an empty set of candidates."""
    Index(RunPaths(Path()), storage).eligible(1, policy_version=0)


def _recorded(step: int, rows: pa.Table) -> pa.Table:
    """The rows of a ledger with the columns of `batches`: step, place from 0, then those of the ledger."""
    first = {"step": np.full(rows.num_rows, step, np.int32), "place": np.arange(rows.num_rows, dtype=np.int32)}
    return pa.table({**first, **{name: rows[name] for name in rows.column_names}})


def open_index(paths: RunPaths, storage: StorageSettings | None = None, **how: Any) -> Index:
    index = Index(paths, storage, **how)
    index.refresh()
    return index
