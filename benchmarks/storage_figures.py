"""`storage`: what it costs to choose, to gather, to publish and to open, beside the old ways of keeping rows.

Every time is a median of rounds that found something: an empty result is an error. Times are CPU seconds of all threads, so that
other work on the machine does not count. Only what waits for the disk (publishing, ledgers) is timed by the clock. Both sides of
a ratio are measured in turns in one run, on the same rows. Files that are read lie in the page cache: cold disks and network file
systems are not measured. What a step gathers, and the plain copy of as many bytes beside it, come from memory that no cache
holds. The program has just done a little of the same work, except for gather_first_ms.

The old ways are a line of JSON for each row, as the system before this one kept them, and a Parquet file that holds the token
lists.
"""

import tempfile
from pathlib import Path
from statistics import median

from benchmarks.outcome import Outcome, Target, found, timed
from benchmarks.storage_gathering import STEP_SHARDS, gathering
from benchmarks.storage_rows import ROWS_PER_START_GROUP, VERSIONS, facts_of_a_run
from storage.index import Index
from storage.ledger import ROWS_SCHEMA, write_ledger
from storage.runs import RunPaths
from storage.selection import SelectionQuery
from storage.snapshots import CoveredShard, file_marks, write_snapshot
from telemetry.errors import InputError

MAX_POLICY_LAG = 16
OTHER_BLEND = {"centres_gained": 0.5, "sos_share": 2.0, "survival": 1.0}
TARGETS = {
    "select_1e6_ms": Target(at_most=100.0),
    "select_1e6_over_1e4": Target(at_most=6.0),
    "gather_over_memcpy": Target(at_most=10.0),
    "gather_vs_json": Target(at_least=30.0),
    "gather_vs_parquet": Target(at_least=100.0),
    "heap_bytes_per_gb_mapped": Target(at_most=1e6),
    "attach_ms": Target(at_most=15.0),
    "ledger_ms": Target(at_most=15.0),
    "open_1e5_s": Target(at_most=0.3),
    "write_crc_cost_share": Target(at_most=0.1),
    "gather_crc_cost_share": Target(at_most=0.1),
}


def bench_storage(*, rounds: int = 15, scale: float = 1.0, seed: int = 0) -> Outcome:
    """All figures; `scale` below 1 makes runs of fewer rows, whose figures no longer are of what their names say.

    Raises:
        InputError: there is nothing to measure.
    """
    if rounds < 1 or not 0.005 <= scale <= 1:
        raise InputError(f"There is nothing to measure in {rounds} rounds at a scale of {scale:g}: at least 1, and 0.005 to 1.")
    metrics: dict[str, float] = {"scale": scale}
    for part in (_selecting, _opening, gathering):
        with tempfile.TemporaryDirectory() as folder:
            metrics |= part(Path(folder), rounds, scale, seed)
    return Outcome(benchmark="storage", metrics=metrics, targets=TARGETS)


def _selecting(folder: Path, rounds: int, scale: float, seed: int) -> dict[str, float]:
    """Choosing a step's rows among a few and among very many, in turns; and laying another blend over the many."""
    few = _run_of_facts(folder / "few", round(1e4 * scale), shard_groups=1, seed=seed)
    many = _run_of_facts(folder / "many", round(1e6 * scale), shard_groups=10, seed=seed)
    indexes = {paths: _opened(Index(paths)) for paths in (few, many)}
    for paths, index in indexes.items():
        _use_some_rows(paths, index)
    times: dict[RunPaths, list[float]] = {few: [], many: []}
    for step in range(rounds + 1):
        for paths, index in indexes.items():
            query = _query(step)
            took, chosen = timed(lambda index=index, query=query: index.select_batch(query))
            found(chosen.rows.num_rows, f"a selection among the rows of {paths.root.name}")
            if step:  # the first one warms up
                times[paths].append(took)
    regroup, again = timed(lambda: _opened(Index(many, blend=OTHER_BLEND)))
    kept, _ = timed(lambda: _opened(Index(many)))
    found(again.select_batch(_query(0)).rows.num_rows, "a selection under another blend")
    return {
        "select_1e6_ms": 1000 * median(times[many]),
        "select_1e6_over_1e4": median(times[many]) / median(times[few]),
        "regroup_1e6_s": regroup,
        "open_1e6_s": kept,
    }


def _opening(folder: Path, rounds: int, scale: float, seed: int) -> dict[str, float]:
    """From a snapshot over many small shards, first without ledgers, then with ledgers of four of ten advantage groups."""
    paths = _run_of_facts(folder / "run", round(1e5 * scale), shard_groups=1, seed=seed)
    plain = median(timed(lambda: _opened(Index(paths)))[0] for _ in range(min(rounds, 7)))
    _use_some_rows(paths, _opened(Index(paths)), STEP_SHARDS * ROWS_PER_START_GROUP)
    used = median(timed(lambda: _opened(Index(paths)))[0] for _ in range(min(rounds, 3)))
    return {"open_1e5_s": plain, "open_1e5_with_ledgers_s": used}


def _run_of_facts(root: Path, rows: int, *, shard_groups: int, seed: int) -> RunPaths:
    """A run whose shards are known by a snapshot alone; the files themselves are empty, and nothing opens them."""
    paths = RunPaths(root).create()
    groups = max(rows // ROWS_PER_START_GROUP, 2)
    (paths.shards / "bench").mkdir()
    shards = []
    for first in range(0, groups, shard_groups):
        some = range(first, min(first + shard_groups, groups))
        path = paths.shards / "bench" / f"{first:06d}.arrow"
        path.touch()
        size, written = file_marks(path) or (0, 0)
        shards.append(
            CoveredShard(
                producer="bench",
                number=first,
                next_start_group=some.stop,
                start_groups=tuple(some),
                size=size,
                written_ns=written,
            )
        )
    write_snapshot(paths.index, facts_of_a_run(shards, seed))
    return paths


def _use_some_rows(paths: RunPaths, index: Index, rows_a_step: int = 2**62) -> None:
    """Record four of ten advantage groups as trained on: how a run looks that has been at work for long."""
    names = ", ".join(f'"{name}"' for name in ROWS_SCHEMA.names if name not in ("policy_lag", "advantage_group"))
    rows = index.connection.sql(
        f"SELECT {names}, 0::INTEGER AS policy_lag, 0::INTEGER AS advantage_group FROM decisions "
        "WHERE md5_number(concat_ws(':', start_group, power)) % 10 < 4"
    ).to_arrow_table()
    found(rows.num_rows, "rows that were used")
    for step, first in enumerate(range(0, rows.num_rows, rows_a_step), 1):
        write_ledger(paths, "bench", step, rows.slice(first, rows_a_step), {})
    index.refresh()


def _query(step: int) -> SelectionQuery:
    return SelectionQuery(
        step=step,
        policy_version=VERSIONS - 1,
        max_policy_lag=MAX_POLICY_LAG,
        start_groups=STEP_SHARDS,
        lineage="bench",
        seed=0,
    )


def _opened(index: Index) -> Index:
    found(index.refresh(), "decisions of a snapshot")
    found(not index.refused, "a snapshot that is whole")
    return index
