"""`storage`: the time to choose, gather, publish and open rows.

Times are medians in CPU seconds of all threads; publishing and ledgers are disk-bound and in wall seconds. An empty result is an
error. Arms of a ratio alternate in one run. Files are in the page cache; cold disks and network file systems are not covered.
"""

import tempfile
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa

from benchmarks.outcome import Outcome, Target, require_result, timed, waited
from benchmarks.storage_rows import ROWS_PER_START_GROUP, VERSIONS, decisions_of, history, phases_of
from entente.telemetry.errors import InputError
from storage.index import Index, open_index
from storage.ledger import ROWS_SCHEMA, write_ledger
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.shards import publish_shard

STEP_SHARDS = 12
"""Start groups of a step, one per shard: 504 rows."""
GATHERED_SHARDS = 64
STORAGE = StorageSettings(max_policy_lag=16)
TARGETS = {
    "choose_1e6_ms": Target(at_most=100.0),
    "choose_1e6_over_1e4": Target(at_most=6.0),
    "attach_ms": Target(at_most=15.0),
    "ledger_ms": Target(at_most=15.0),
}
_AT_ANY_SCALE = {"attach_ms", "ledger_ms"}


def bench_storage(*, rounds: int = 15, scale: float = 1.0, seed: int = 0) -> Outcome:
    """Measure all figures; with `scale` < 1 most have no target. InputError for a `scale` not in [0.005, 1]."""
    if not 0.005 <= scale <= 1:
        raise InputError(f"There is nothing to measure at a scale of {scale:g}: --scale is from 0.005 to 1.")
    metrics: dict[str, float] = {"scale": scale}
    for part in (_choosing, _gathering):
        with tempfile.TemporaryDirectory() as folder:
            metrics |= part(Path(folder), rounds, scale, seed)
    targets = {name: target for name, target in TARGETS.items() if scale == 1 or name in _AT_ANY_SCALE}
    return Outcome(benchmark="storage", metrics=metrics, targets=targets)


def _choosing(folder: Path, rounds: int, scale: float, seed: int) -> dict[str, float]:
    """Selection of a step with a history of 10,000 and of a million rows, most of them beyond the staleness budget."""
    few = run_with_history(folder / "few", round(1e4 * scale), shard_groups=1, seed=seed)
    many = run_with_history(folder / "many", round(1e6 * scale), shard_groups=100, seed=seed)
    for paths in (few, many):
        use_some_rows(paths)
    oldest = VERSIONS - 1 - STORAGE.max_policy_lag
    opening, index_of_many = timed(lambda: opened(Index(many, STORAGE, oldest=oldest)))
    indexes = {few: opened(Index(few, STORAGE, oldest=oldest)), many: index_of_many}
    times: dict[RunPaths, list[float]] = {few: [], many: []}
    for step in range(rounds + 1):
        for paths, index in indexes.items():
            took, (chosen, _) = timed(lambda index=index, step=step: _choose(index, step))
            require_result(chosen.num_rows, f"a selection among the rows of {paths.root.name}")
            if step:  # the first one warms up
                times[paths].append(took)
    return {
        "choose_1e6_ms": 1000 * median(times[many]),
        "choose_1e6_over_1e4": median(times[many]) / median(times[few]),
        "open_budget_of_1e6_s": opening,
    }


def run_with_history(root: Path, rows: int, *, shard_groups: int, seed: int) -> RunPaths:
    paths = RunPaths(root).create()
    groups = max(rows // ROWS_PER_START_GROUP, 2)
    for first in range(0, groups, shard_groups):
        some = range(first, min(first + shard_groups, groups))
        publish_shard(paths, "bench", first, *history(some, groups, seed), {})
    return paths


def use_some_rows(paths: RunPaths) -> None:
    """Mark 40 % of the advantage groups as trained, as in a run after many steps."""
    index = open_index(paths)
    names = ", ".join(f'"{name}"' for name in ROWS_SCHEMA.names if name not in ("policy_lag", "advantage_group"))
    rows = index.connection.sql(
        f"SELECT {names}, 0::INTEGER AS policy_lag, 0::INTEGER AS advantage_group FROM decisions "
        "WHERE md5_number(concat_ws(':', start_group, power)) % 10 < 4"
    ).to_arrow_table()
    require_result(rows.num_rows, "rows that were used")
    write_ledger(paths, VERSIONS - 1, rows, {})


def _choose(index: Index, step: int) -> tuple[pa.Table, dict[str, int]]:
    return index.select_batch(VERSIONS + step, policy_version=VERSIONS - 1, start_groups=STEP_SHARDS)


def opened(index: Index) -> Index:
    """The refreshed index. Raises DataError if there are no rows, or damaged ones."""
    require_result(index.refresh(), "decisions of a run")
    require_result(not index.refused, "shards that are whole")
    return index


# -- real shards ----------------------------------------------------------------------------------------------------------


def _gathering(folder: Path, rounds: int, scale: float, seed: int) -> dict[str, float]:
    paths = RunPaths(folder / "run").create()
    index = open_index(paths)
    attach = []
    for number in range(max(rounds + 1, round(GATHERED_SHARDS * scale), STEP_SHARDS)):
        rows, phases = decisions_of(range(number, number + 1), seed), phases_of(range(number, number + 1))
        publish_shard(paths, "bench", number, rows, phases, {})
        took, taken = timed(index.refresh)
        require_result(taken == ROWS_PER_START_GROUP, "the rows of a new shard")
        attach.append(took)
    pool = rows_of(index)
    samples = [_sample(pool, seed, round_) for round_ in range(rounds + 1)]
    ledger = [
        waited(lambda step=step, rows=rows: write_ledger(paths, step, rows, {}))[0] for step, rows in enumerate(samples, start=1)
    ]
    gather = []
    for rows in samples:
        took, batch = timed(lambda rows=rows: index.gather(rows))
        require_result(len(batch.input_ids), "the tokens of a batch")
        gather.append(took)
    return {
        "attach_ms": 1000 * median(attach[1:]),
        "ledger_ms": 1000 * median(ledger[1:]),
        "gather_ms": 1000 * median(gather[1:]),
    }


def rows_of(index: Index) -> pa.Table:
    query = (
        'SELECT shard, "row", decision_id, start_group, fork, phase_index, power, phase, policy_version, '
        '0::INTEGER AS policy_lag, checksum, "return", (-1)::INTEGER AS advantage_group FROM decisions '
        "ORDER BY start_group, power, fork"
    )
    return index.connection.sql(query).to_arrow_table().cast(ROWS_SCHEMA).combine_chunks()


def _sample(pool: pa.Table, seed: int, round_: int) -> pa.Table:
    groups = np.random.default_rng([seed, round_]).permutation(pool.num_rows // ROWS_PER_START_GROUP)[:STEP_SHARDS]
    return pool.take(pa.array((groups[:, None] * ROWS_PER_START_GROUP + np.arange(ROWS_PER_START_GROUP)).ravel()))
