"""The part of `entente bench storage` about real shards with tokens: publishing, taking in, recording, gathering, and what is
mapped; beside the old ways of keeping rows: a line of JSON for each, as the system before this one kept them, and a Parquet file
with the token lists in it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.outcome import found, timed, timed_cold, waited
from benchmarks.storage_rows import ROWS_PER_START_GROUP, decisions_of, plies_of
from storage.gather import Batch
from storage.index import Index
from storage.ledger import ROWS_SCHEMA, write_ledger
from storage.mapped import MappedShard, MappedShards
from storage.runs import RunPaths
from storage.schema import as_array, row_checksums
from storage.selection import SelectionQuery
from storage.shards import open_plies, open_shard, publish_shard

STEP_SHARDS = 12
"""Start groups of a step, each in a shard of its own: 504 rows."""
GATHERED_SHARDS = 64
PARQUET_ROWS = 84_000
"""Rows of the Parquet file that a step's rows are sought in, most of them of other decisions."""
WAITS = 5
"""Steps whose wait for rows is measured, as each needs new shards."""


def gathering(folder: Path, rounds: int, scale: float, seed: int) -> dict[str, float]:
    """Real shards with tokens, one start group each: publishing, taking in, recording, gathering, and what is mapped."""
    paths = RunPaths(folder / "run").create()
    index = Index(paths)
    index.refresh()
    attach, publish = [], []
    for number in range(max(rounds + 1, round(GATHERED_SHARDS * scale), STEP_SHARDS)):
        rows, plies = decisions_of(range(number, number + 1), seed), plies_of(range(number, number + 1))
        publish.append(
            waited(lambda number=number, rows=rows, plies=plies: publish_shard(paths, "bench", number, rows, plies, {}))[0]
        )
        took, taken = timed(index.refresh)
        found(taken == ROWS_PER_START_GROUP, "the rows of a new shard")
        attach.append(took)
    names = [f"bench/{number:06d}.arrow" for number in range(len(attach))]
    everything = _rows_of(index)
    pool, few = everything.slice(ROWS_PER_START_GROUP), everything.slice(0, 3)
    draws = [_draw(pool, seed, round_) for round_ in range(rounds + 1)]
    scattered = [_draw_scattered(pool, seed, round_) for round_ in range(rounds + 1)]
    ledger = [
        waited(lambda step=step, rows=rows: write_ledger(paths, "bench", step, rows, {}))[0] for step, rows in enumerate(draws)
    ]
    return {
        "attach_ms": 1000 * median(attach[1:]),
        "ledger_ms": 1000 * median(ledger[1:]),
        "heap_bytes_per_gb_mapped": _heap_per_gb(paths, names),
        **_waits(paths, index, len(names), min(rounds, WAITS), seed),
        **_publish_share(paths, names, median(publish[1:])),
        **_gather_ratios(index, paths, names, draws, scattered, few, folder, round(PARQUET_ROWS * scale)),
    }


def _waits(paths: RunPaths, index: Index, first: int, rounds: int, seed: int) -> dict[str, float]:
    """What a step waits for its rows after as many start groups came in as it uses, with and without a look ahead."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for round_ in range(2 * rounds):
        ahead = round_ % 2 == 0
        for number in range(first + round_ * STEP_SHARDS, first + (round_ + 1) * STEP_SHARDS):
            groups = range(number, number + 1)
            publish_shard(paths, "bench", number, decisions_of(groups, seed), plies_of(groups), {})
        query = SelectionQuery(
            step=round_, policy_version=0, max_policy_lag=0, start_groups=STEP_SHARDS, lineage="waits", seed=seed
        )
        if ahead:
            index.look_ahead(query)
            index.refresh()  # until that is done, as it is when a step was long enough
        took, batch = timed(lambda query=query: (index.refresh(), index.gather(index.select_batch(query).rows))[1])
        found(len(batch.input_ids), "the rows of a step")
        times[ahead].append(took)
    return {"step_waits_ms": 1000 * median(times[False]), "step_waits_ahead_ms": 1000 * median(times[True])}


def _gather_ratios(
    index: Index,
    paths: RunPaths,
    names: list[str],
    draws: list[pa.Table],
    scattered: list[pa.Table],
    few: pa.Table,
    folder: Path,
    parquet_rows: int,
) -> dict[str, float]:
    """Gathering against a plain copy of as many bytes, against lines of JSON and against Parquet, in turns, each time from memory
    that no cache holds, and so with rows that lie one by one among others."""
    tables = {name: open_shard(paths.shards / name) for name in names}
    old = _OldWays.of(tables, folder, parquet_rows)
    far = np.ones(max(16, round(256 * parquet_rows / PARQUET_ROWS)) * 2**20 // 8)  # more than any cache holds
    copied = np.ones(len(far) // 4)

    shards = MappedShards(paths.shards)

    def gathered(rows: pa.Table) -> tuple[float, Batch]:
        return timed_cold(lambda: index.gather(rows), far, lambda: index.gather(few))

    times: dict[str, list[float]] = {name: [] for name in ("gather", "first", "look", "scattered", "memcpy", "json", "parquet")}
    for number, (rows, others) in enumerate(zip(draws, scattered, strict=True)):
        took, batch = gathered(rows)
        found(len(batch.input_ids), "the tokens of a batch")
        source = far[number * 64 :][: _bytes_of(batch) // 8]
        copy = timed_cold(lambda source=source: _plain_copy(copied, source), far, lambda: _plain_copy(copied[-64:], far[-64:]))
        looked_at = [shards.get(name) for name in dict.fromkeys(rows["shard"].to_pylist())]
        ways = {
            "gather": (took, batch.input_ids),
            "first": (timed_cold(lambda rows=rows: index.gather(rows), far)[0], batch.input_ids),
            "look": (timed_cold(lambda shards=looked_at: _look_again(shards), far)[0], batch.input_ids),
            "scattered": (gathered(others)[0], batch.input_ids),
            "memcpy": (copy[0], batch.input_ids),
            "json": timed_cold(lambda rows=rows: old.from_json(rows), far),
            "parquet": timed_cold(lambda rows=rows: old.from_parquet(rows), far),
        }
        for name, (seconds, tokens) in ways.items():
            found(np.array_equal(tokens, batch.input_ids), f"the same tokens by way of {name}")
            if number:
                times[name].append(seconds)
    middle = {name: median(some) for name, some in times.items()}
    return {
        "gather_ms": 1000 * middle["gather"],
        "gather_first_ms": 1000 * middle["first"],
        "gather_over_memcpy": middle["gather"] / middle["memcpy"],
        "gather_scattered_over_memcpy": middle["scattered"] / middle["memcpy"],
        "gather_vs_json": middle["json"] / middle["gather"],
        "gather_vs_parquet": middle["parquet"] / middle["gather"],
        "gather_crc_cost_share": middle["look"] / middle["first"],
    }


def _plain_copy(target: np.ndarray, source: np.ndarray) -> None:
    np.copyto(target[: len(source)], source)


def _look_again(shards: list[MappedShard]) -> bool:
    """What gathering does to find a shard that changed since it was mapped."""
    return all(shard.is_unchanged() for shard in shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OldWays:
    """The same rows as lines of JSON in memory, and among others in one Parquet file with its lists."""

    lines: Mapping[int, str]
    """By decision."""
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
        """Parse each row's line, then pack its lists."""
        parsed = [json.loads(self.lines[number]) for number in rows["decision_id"].to_pylist()]
        packed = [np.concatenate([np.array(row[name], dtype) for row in parsed]) for name, dtype in _LISTS.items()]
        return packed[0]

    def from_parquet(self, rows: pa.Table) -> np.ndarray:
        """Join the chosen rows with the file, in their order, then pack its lists."""
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
    """What the checksums of a published shard cost: those of its rows and its plies."""
    tables = [reader(paths.shards / names[0]) for reader in (open_shard, open_plies)]
    sums = median(waited(lambda: [row_checksums(table) for table in tables])[0] for _ in range(5))
    return {"publish_ms": 1000 * publish_s, "write_crc_cost_share": sums / publish_s}


def _heap_per_gb(paths: RunPaths, names: list[str]) -> float:
    """Bytes that Arrow holds on its heap once the shards are open, for each GB of them."""
    before = pa.total_allocated_bytes()
    tables = [open_shard(paths.shards / name) for name in names]
    grown = pa.total_allocated_bytes() - before
    found(sum(table.num_rows for table in tables), "rows of mapped shards")
    return grown / sum((paths.shards / name).stat().st_size for name in names) * 1e9


def _rows_of(index: Index) -> pa.Table:
    query = (
        'SELECT shard, "row", decision_id, start_group, fork, ply, power, phase, policy_version, 0::INTEGER AS policy_lag, '
        'checksum, "return", (-1)::INTEGER AS advantage_group FROM decisions ORDER BY start_group, power, fork'
    )
    return index.connection.sql(query).to_arrow_table().cast(ROWS_SCHEMA).combine_chunks()


def _draw(pool: pa.Table, seed: int, round_: int) -> pa.Table:
    """Other whole start groups in every round, as a step chooses them."""
    groups = np.random.default_rng([seed, round_]).permutation(pool.num_rows // ROWS_PER_START_GROUP)[:STEP_SHARDS]
    return pool.take(pa.array((groups[:, None] * ROWS_PER_START_GROUP + np.arange(ROWS_PER_START_GROUP)).ravel()))


def _draw_scattered(pool: pa.Table, seed: int, round_: int) -> pa.Table:
    """As many single rows, as no step chooses them: each has to be copied by itself."""
    rows = np.random.default_rng([seed, round_, 1]).permutation(pool.num_rows)[: STEP_SHARDS * ROWS_PER_START_GROUP]
    return pool.take(pa.array(rows))


def _bytes_of(batch: Batch) -> int:
    return sum(getattr(batch, field.name).nbytes for field in fields(batch))
