"""`storage`: the time to choose, gather, publish and open rows, beside JSON lines and Parquet.

Times are medians, in CPU seconds of all threads, so that other work on the machine does not count. Publishing and ledgers wait
for the disk and are measured by wall time. An empty result is an error. Arms of a ratio take turns in one run, on the same rows.
Files are in the page cache; cold disks and network file systems are not measured. The bytes that are gathered, and those of the
plain copy beside them, are in no CPU cache. The program itself has just run on other data.

The other arms are one line of JSON for each row, as in the old system, and a Parquet file with the token lists.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.outcome import Outcome, Target, require_found, timed, timed_cold, waited
from benchmarks.storage_rows import ROWS_PER_START_GROUP, VERSIONS, decisions_of, history, plies_of
from storage.gather import Batch
from storage.index import Index, open_index
from storage.ledger import ROWS_SCHEMA, write_ledger
from storage.runs import RunPaths
from storage.schema import as_array, row_checksums
from storage.selection import SelectionQuery
from storage.shards import open_plies, open_shard, publish_shard, publish_tables
from telemetry.errors import InputError

STEP_SHARDS = 12
"""Start groups of a step, each in its own shard: 504 rows."""
GATHERED_SHARDS = 64
PARQUET_ROWS = 84_000
"""Rows of the Parquet file, most of them of other decisions."""
MAX_POLICY_LAG = 16
TARGETS = {
    "choose_1e6_ms": Target(at_most=100.0),
    "choose_1e6_over_1e4": Target(at_most=6.0),
    "gather_over_memcpy": Target(at_most=20.0),
    "gather_vs_json": Target(at_least=20.0),
    "gather_vs_parquet": Target(at_least=100.0),
    "heap_bytes_per_gb_mapped": Target(at_most=1e6),
    "attach_ms": Target(at_most=15.0),
    "ledger_ms": Target(at_most=15.0),
    "write_crc_cost_share": Target(at_most=0.1),
}
_AT_ANY_SCALE = {"scale", "attach_ms", "ledger_ms", "heap_bytes_per_gb_mapped", "write_crc_cost_share"}
"""Figures of a shard or of a step, which have the same size at every scale."""


def bench_storage(*, rounds: int = 15, scale: float = 1.0, seed: int = 0) -> Outcome:
    """Measure all figures. A `scale` below 1 makes smaller runs, so that most figures are scaled down.

    Raises:
        InputError: `rounds` is below 1, or `scale` is not between 0.005 and 1.
    """
    if rounds < 1 or not 0.005 <= scale <= 1:
        raise InputError(f"There is nothing to measure in {rounds} rounds at a scale of {scale:g}: at least 1, and 0.005 to 1.")
    metrics: dict[str, float] = {"scale": scale}
    for part in (_choosing, _scanning, _gathering):
        with tempfile.TemporaryDirectory() as folder:
            metrics |= part(Path(folder), rounds, scale, seed)
    scaled_down = metrics.keys() - _AT_ANY_SCALE if scale < 1 else ()
    return Outcome(benchmark="storage", metrics=metrics, targets=TARGETS, scaled_down=scaled_down)


def _choosing(folder: Path, rounds: int, scale: float, seed: int) -> dict[str, float]:
    """Choosing the rows of a step with a history of 10,000 and of a million rows, most of them beyond the staleness budget."""
    few = run_with_history(folder / "few", round(1e4 * scale), shard_groups=1, seed=seed)
    many = run_with_history(folder / "many", round(1e6 * scale), shard_groups=100, seed=seed)
    for paths in (few, many):
        use_some_rows(paths)
    opening, index_of_many = timed(lambda: opened(Index(many, oldest=VERSIONS - 1 - MAX_POLICY_LAG)))
    indexes = {few: opened(Index(few, oldest=VERSIONS - 1 - MAX_POLICY_LAG)), many: index_of_many}
    times: dict[RunPaths, list[float]] = {few: [], many: []}
    for step in range(rounds + 1):
        for paths, index in indexes.items():
            query = step_query(step)
            took, chosen = timed(lambda index=index, query=query: index.select_batch(query))
            require_found(chosen.rows.num_rows, f"a selection among the rows of {paths.root.name}")
            if step:  # the first one warms up
                times[paths].append(took)
    return {
        "choose_1e6_ms": 1000 * median(times[many]),
        "choose_1e6_over_1e4": median(times[many]) / median(times[few]),
        "open_budget_of_1e6_s": opening,
    }


def _scanning(folder: Path, rounds: int, scale: float, seed: int) -> dict[str, float]:
    """Reading every row of a run, as for a query over it."""
    paths = run_with_history(folder / "run", round(1e5 * scale), shard_groups=10, seed=seed)
    return {"scan_1e5_s": median(timed(lambda: opened(Index(paths)))[0] for _ in range(min(rounds, 5)))}


def run_with_history(root: Path, rows: int, *, shard_groups: int, seed: int) -> RunPaths:
    """A run of so many rows of one token each, with `shard_groups` start groups in a shard."""
    paths = RunPaths(root).create()
    groups = max(rows // ROWS_PER_START_GROUP, 2)
    for first in range(0, groups, shard_groups):
        some = range(first, min(first + shard_groups, groups))
        publish_tables(paths, "bench", first, *history(some, groups, seed), {})
    return paths


def use_some_rows(paths: RunPaths) -> None:
    """Record four of ten advantage groups as trained on, as in a run after many steps."""
    index = open_index(paths)
    names = ", ".join(f'"{name}"' for name in ROWS_SCHEMA.names if name not in ("policy_lag", "advantage_group"))
    rows = index.connection.sql(
        f"SELECT {names}, 0::INTEGER AS policy_lag, 0::INTEGER AS advantage_group FROM decisions "
        "WHERE md5_number(concat_ws(':', start_group, power)) % 10 < 4"
    ).to_arrow_table()
    require_found(rows.num_rows, "rows that were used")
    write_ledger(paths, VERSIONS - 1, rows, {})


def step_query(step: int) -> SelectionQuery:
    """The query of a step by the newest version of a run with a history."""
    return SelectionQuery(
        step=VERSIONS + step,
        policy_version=VERSIONS - 1,
        max_policy_lag=MAX_POLICY_LAG,
        start_groups=STEP_SHARDS,
        seed=0,
    )


def opened(index: Index) -> Index:
    """The index, filled.

    Raises:
        DataError: there was nothing to read, or it was damaged.
    """
    require_found(index.refresh(), "decisions of a run")
    require_found(not index.refused, "shards that are whole")
    return index


# -- real shards ----------------------------------------------------------------------------------------------------------


def _gathering(folder: Path, rounds: int, scale: float, seed: int) -> dict[str, float]:
    """Real shards with tokens, one start group each: publishing, attaching, ledgers, gathering, and mapped memory."""
    paths = RunPaths(folder / "run").create()
    index = open_index(paths)
    attach, publish = [], []
    for number in range(max(rounds + 1, round(GATHERED_SHARDS * scale), STEP_SHARDS)):
        rows, plies = decisions_of(range(number, number + 1), seed), plies_of(range(number, number + 1))
        publish.append(
            waited(lambda number=number, rows=rows, plies=plies: publish_shard(paths, "bench", number, rows, plies, {}))[0]
        )
        took, taken = timed(index.refresh)
        require_found(taken == ROWS_PER_START_GROUP, "the rows of a new shard")
        attach.append(took)
    names = [f"bench/{number:06d}.arrow" for number in range(len(attach))]
    everything = rows_of(index)
    pool, few = everything.slice(ROWS_PER_START_GROUP), everything.slice(0, 3)
    draws = [_draw(pool, seed, round_) for round_ in range(rounds + 1)]
    ledger = [
        waited(lambda step=step, rows=rows: write_ledger(paths, step, rows, {}))[0] for step, rows in enumerate(draws, start=1)
    ]
    return {
        "attach_ms": 1000 * median(attach[1:]),
        "ledger_ms": 1000 * median(ledger[1:]),
        "heap_bytes_per_gb_mapped": _heap_per_gb(paths, names),
        **_publish_share(paths, names, median(publish[1:])),
        **_gather_ratios(index, paths, names, draws, few, folder, round(PARQUET_ROWS * scale)),
    }


def _gather_ratios(
    index: Index,
    paths: RunPaths,
    names: list[str],
    draws: list[pa.Table],
    few: pa.Table,
    folder: Path,
    parquet_rows: int,
) -> dict[str, float]:
    """Gathering beside a plain copy of as many bytes, JSON lines and Parquet, in turns, with cold caches.

    `draws` are whole start groups, `few` the rows on which the program warms up.
    """
    tables = {name: open_shard(paths.shards / name) for name in names}
    old = _OldWays.of(tables, folder, parquet_rows)
    far = np.ones(max(16, round(256 * parquet_rows / PARQUET_ROWS)) * 2**20 // 8)  # larger than every cache
    copied = np.ones(len(far) // 4)
    times: dict[str, list[float]] = {name: [] for name in ("gather", "memcpy", "json", "parquet")}
    for number, rows in enumerate(draws):
        took, batch = timed_cold(lambda rows=rows: index.gather(rows), far, lambda: index.gather(few))
        require_found(len(batch.input_ids), "the tokens of a batch")
        source = far[number * 64 :][: _bytes_of(batch) // 8]
        copy = timed_cold(lambda source=source: _plain_copy(copied, source), far, lambda: _plain_copy(copied[-64:], far[-64:]))
        ways = {
            "gather": (took, batch.input_ids),
            "memcpy": (copy[0], batch.input_ids),
            "json": timed_cold(lambda rows=rows: old.from_json(rows), far),
            "parquet": timed_cold(lambda rows=rows: old.from_parquet(rows), far),
        }
        for name, (seconds, tokens) in ways.items():
            require_found(np.array_equal(tokens, batch.input_ids), f"the same tokens read by {name}")
            if number:
                times[name].append(seconds)
    middle = {name: median(some) for name, some in times.items()}
    return {
        "gather_ms": 1000 * middle["gather"],
        "gather_over_memcpy": middle["gather"] / middle["memcpy"],
        "gather_vs_json": middle["json"] / middle["gather"],
        "gather_vs_parquet": middle["parquet"] / middle["gather"],
    }


def _plain_copy(target: np.ndarray, source: np.ndarray) -> None:
    np.copyto(target[: len(source)], source)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OldWays:
    """The same rows as JSON lines in memory, and in a Parquet file with many others."""

    lines: Mapping[int, str]
    """Line by decision id."""
    parquet: Path
    connection: duckdb.DuckDBPyConnection

    @classmethod
    def of(cls, tables: Mapping[str, pa.Table], folder: Path, parquet_rows: int) -> "_OldWays":
        joined = pa.concat_tables([table.replace_schema_metadata(None) for table in tables.values()]).unify_dictionaries()
        parquet = folder / "rows.parquet"
        with pq.ParquetWriter(parquet, joined.schema, compression="zstd") as writer:
            for copy in range(max(1, parquet_rows // joined.num_rows)):
                numbers = pa.array(as_array(joined["decision_id"]).to_numpy() * (-copy if copy else 1))
                writer.write_table(joined.set_column(0, joined.schema.field(0), numbers))
        lines = {row["decision_id"]: json.dumps(row) for row in joined.to_pylist()}
        return cls(lines=lines, parquet=parquet, connection=duckdb.connect())

    def from_json(self, rows: pa.Table) -> np.ndarray:
        """Parse the line of each row, then pack the lists; returns the token ids."""
        parsed = [json.loads(self.lines[number]) for number in rows["decision_id"].to_pylist()]
        packed = [np.concatenate([np.array(row[name], dtype) for row in parsed]) for name, dtype in _LISTS.items()]
        return packed[0]

    def from_parquet(self, rows: pa.Table) -> np.ndarray:
        """Join the chosen rows with the file, in their order, then pack the lists; returns the token ids."""
        self.connection.register(
            "chosen", rows.select(["decision_id"]).append_column("place", pa.array(np.arange(rows.num_rows)))
        )
        lists = ", ".join(_LISTS)
        query = f"SELECT {lists} FROM chosen JOIN '{self.parquet}' USING (decision_id) ORDER BY place"
        found = self.connection.sql(query).to_arrow_table().combine_chunks()
        packed = [found[name].chunk(0).flatten().to_numpy() for name in _LISTS]
        self.connection.unregister("chosen")
        return packed[0]


_LISTS: dict[str, Any] = {
    "input_ids": np.int32,
    "behaviour_logprobs": np.float32,
    "legal_ids": np.int32,
    "legal_offsets": np.int32,
}


def _publish_share(paths: RunPaths, names: list[str], publish_s: float) -> dict[str, float]:
    """The checksums of the rows and plies of a shard, as a share of publishing it."""
    tables = [reader(paths.shards / names[0]) for reader in (open_shard, open_plies)]
    sums = median(waited(lambda: [row_checksums(table) for table in tables])[0] for _ in range(5))
    return {"write_crc_cost_share": sums / publish_s}


def _heap_per_gb(paths: RunPaths, names: list[str]) -> float:
    """Bytes on Arrow's heap after the shards are open, for each GB of shards."""
    before = pa.total_allocated_bytes()
    tables = [open_shard(paths.shards / name) for name in names]
    grown = pa.total_allocated_bytes() - before
    require_found(sum(table.num_rows for table in tables), "rows of mapped shards")
    return grown / sum((paths.shards / name).stat().st_size for name in names) * 1e9


def rows_of(index: Index) -> pa.Table:
    """All rows, as a selection."""
    query = (
        'SELECT shard, "row", decision_id, start_group, fork, ply, power, phase, policy_version, 0::INTEGER AS policy_lag, '
        'checksum, "return", (-1)::INTEGER AS advantage_group FROM decisions ORDER BY start_group, power, fork'
    )
    return index.connection.sql(query).to_arrow_table().cast(ROWS_SCHEMA).combine_chunks()


def _draw(pool: pa.Table, seed: int, round_: int) -> pa.Table:
    """STEP_SHARDS whole start groups, as a step chooses them; other ones in every round."""
    groups = np.random.default_rng([seed, round_]).permutation(pool.num_rows // ROWS_PER_START_GROUP)[:STEP_SHARDS]
    return pool.take(pa.array((groups[:, None] * ROWS_PER_START_GROUP + np.arange(ROWS_PER_START_GROUP)).ravel()))


def _bytes_of(batch: Batch) -> int:
    columns = (getattr(batch, field.name) for field in fields(batch))
    return sum(column.nbytes for column in columns if column is not None)
