"""Growth with the rows of a run: opening an index, choosing and gathering a step's rows, attaching a shard, memory, and SQL.

Every version plays as many rows at each size (`storage_rows.GROUPS_PER_VERSION`), so more rows are a longer past and not a wider
choice. Each step took twelve start groups, and a ledger says so. The index is a trainer's: it keeps what a step can still choose
at a policy lag of up to sixteen. `sql_...` are of an index that keeps every fact, as `entente sql` has.

Each size is measured in processes of its own, after another one made the run. The facts of all rows but the gathered ones are
made up (`benchmarks/storage_rows.py`); their shards are empty files of 420 rows. The shards that are attached and gathered have
tokens. Times are CPU seconds of one thread.

    python -m benchmarks.growth.rows make FOLDER ROWS SEED
    python -m benchmarks.growth.rows measure FOLDER ROUNDS SEED
    python -m benchmarks.growth.rows sql FOLDER ROUNDS SEED
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import pyarrow as pa

from benchmarks.growth.steps import files_of
from benchmarks.outcome import require_found, timed
from benchmarks.storage_figures import MAX_POLICY_LAG, STEP_SHARDS, empty_shards, opened, rows_of
from benchmarks.storage_rows import GROUPS_PER_VERSION, ROWS_PER_START_GROUP, MadeUpPast, decisions_of, plies_of
from reports.growth import Growth
from storage.index import Index
from storage.ledger import ROWS_SCHEMA, recorded_steps, write_ledger
from storage.runs import RunPaths
from storage.selection import Reach, SelectionQuery
from storage.shards import publish_shard
from storage.snapshots import write_snapshot
from telemetry.errors import DataError
from telemetry.memory import give_back_memory, resident_mib
from telemetry.progress import reporter

SIZES, QUICK_SIZES = (10_000, 100_000, 1_000_000, 10_000_000), (10_000, 100_000, 1_000_000)
FIGURES = {
    "open_s": "opening the index, s",
    "first_open_s": "opening it without a record of settled shards, s",
    "select_ms": "choosing a step's rows, ms",
    "attach_ms": "attaching a shard, ms",
    "gather_ms": "gathering 504 rows, ms",
    "index_mb": "memory of the index, MB RSS",
    "peak_mb": "peak memory of its process, MB RSS",
    "snapshot_mb": "snapshot on disk, MB",
    "sql_open_s": "opening every fact for SQL, s",
    "sql_ms": "a question over all rows, ms",
    "sql_mb": "peak memory of the process that asks, MB RSS",
}
SQL_ROWS = 10_000_000
"""Larger runs are not opened for SQL: their facts are the memory of a server."""
SQL_BYTES_PER_ROW, DISK_BYTES_PER_ROW = 1000, 100
"""Memory and disk for each row, at most."""
QUESTION = 'SELECT power, policy_version, avg("return"), count(*) FROM decisions GROUP BY ALL ORDER BY ALL'
_PRODUCER, _LINEAGE = "real", "bench"
_SHARD_GROUPS = 10
_PART_VERSIONS = 33
_PART_GROUPS = _PART_VERSIONS * GROUPS_PER_VERSION
"""Start groups of a part: 166,320 rows, as large as merged parts become."""


def measure_rows(sizes: Sequence[int], *, rounds: int, seed: int) -> Growth:
    """Measure each size that memory and disk are enough for; a sentence names the others.

    Raises:
        DataError: a process failed.
    """
    points = {}
    for number, rows in enumerate(sizes):
        with TemporaryDirectory(prefix="entente-bench-") as folder:
            disk, memory = shutil.disk_usage(folder).free, psutil.virtual_memory().available
            if rows * DISK_BYTES_PER_ROW > disk:
                needed = rows * DISK_BYTES_PER_ROW / 1e9
                reporter().say(f"{rows:,} rows are left out: they need {needed:.0f} GB of disk, and {disk / 1e9:.1f} GB are free")
                continue
            reporter().stage("sizes of a store", number, len(sizes))
            points[rows] = _run("make", folder, rows, seed) | _run("measure", folder, rounds, seed)
            if rows <= min(SQL_ROWS, memory // SQL_BYTES_PER_ROW):
                points[rows] |= _run("sql", folder, rounds, seed)
            else:
                reporter().say(f"{rows:,} rows are not opened for SQL: all their facts would be in memory")
    reporter().stage("sizes of a store", len(sizes), len(sizes))
    return Growth(axis="rows", figures=FIGURES, points=points)


def _run(*words: object) -> dict[str, float]:
    """Run this program; returns the object that it prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks.growth.rows", *map(str, words)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise DataError(f"the rows could not be measured: {(done.stderr.strip().splitlines() or ['no error was printed'])[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def make(folder: Path, rows: int, seed: int) -> dict[str, float]:
    """Write a run of made-up facts and its ledgers, and open it once, which records the settled shards."""
    paths, past = RunPaths(folder).create(), MadeUpPast(_PART_GROUPS, seed)
    groups = max(rows // ROWS_PER_START_GROUP, 2)
    for first in range(0, groups, _PART_GROUPS):
        part = past.part(empty_shards(paths, range(first, min(first + _PART_GROUPS, groups)), _SHARD_GROUPS))
        require_found(write_snapshot(paths.index, part), "a free name for a part")
        _record_steps(paths, part.decisions, first)
    took, index = timed(lambda: _opened(paths))
    index.select_batch(_query(paths))
    index.snapshot_if_due(1 << 30)
    require_found(index.totals().decisions == groups * ROWS_PER_START_GROUP, "every row")
    return {"first_open_s": took}


def _record_steps(paths: RunPaths, decisions: pa.Table, first: int) -> None:
    """The ledgers of the steps that trained on these rows: each took every tenth start group of its version."""
    named = decisions.select([name for name in ROWS_SCHEMA.names if name in decisions.column_names])
    groups = decisions.num_rows // ROWS_PER_START_GROUP
    apart = GROUPS_PER_VERSION // STEP_SHARDS
    for begin in range(0, groups, GROUPS_PER_VERSION):
        taken = np.arange(begin, min(begin + GROUPS_PER_VERSION, groups), apart)
        places = (taken[:, None] * ROWS_PER_START_GROUP + np.arange(ROWS_PER_START_GROUP)).ravel()
        rows, nothing = named.take(pa.array(places)), np.zeros(len(places))
        for name in ("policy_lag", "return", "advantage_group"):
            rows = rows.append_column(name, pa.array(nothing.astype(ROWS_SCHEMA.field(name).type.to_pandas_dtype())))
        step = (first + begin) // GROUPS_PER_VERSION + 1
        require_found(write_ledger(paths, _LINEAGE, step, rows, {}), "a free name for a ledger")


def measure(folder: Path, rounds: int, seed: int) -> dict[str, float]:
    """The figures of the run in `folder`, to which some real shards are added."""
    with TemporaryDirectory() as empty:
        Index(RunPaths(Path(empty)).create()).refresh()  # loads what every index needs
    give_back_memory()
    before, paths = resident_mib(os.getpid()), RunPaths(folder)
    open_s, index = timed(lambda: _opened(paths))
    version, query = _newest_version(paths), _query(paths)
    attach = list[float]()
    for number in range(STEP_SHARDS):
        groups = range(number, number + 1)
        publish_shard(paths, _PRODUCER, number, decisions_of(groups, seed, version, _PRODUCER), plies_of(groups), {})
        took, taken = timed(index.refresh)
        require_found(taken == ROWS_PER_START_GROUP, "the rows of a new shard")
        attach.append(took)
    real = rows_of(index, _PRODUCER)
    select, gather = list[float](), list[float]()
    for round_ in range(rounds + 1):  # the first round warms up
        took, chosen = timed(lambda round_=round_: index.select_batch(replace(query, seed=round_)))
        require_found(chosen.enough and chosen.rows.num_rows, "a whole selection")
        select.append(took)
        took, batch = timed(lambda: index.gather(real))
        require_found(len(batch.input_ids), "the tokens of a batch")
        gather.append(took)
    give_back_memory()
    return {
        "open_s": open_s,
        "select_ms": 1000 * median(select[1:]),
        "attach_ms": 1000 * median(attach[1:]),
        "gather_ms": 1000 * median(gather[1:]),
        "index_mb": (resident_mib(os.getpid()) - before) * 2**20 / 1e6,
        "peak_mb": _peak_mb(),
        "snapshot_mb": files_of(paths.index)[1],
    }


def ask(folder: Path, rounds: int, seed: int) -> dict[str, float]:
    """What SQL over every fact of the run in `folder` costs."""
    del seed
    open_s, index = timed(lambda: opened(Index(RunPaths(folder))))
    took = [timed(lambda: require_found(index.fetch(QUESTION), "an answer"))[0] for _ in range(rounds + 1)]
    return {"sql_open_s": open_s, "sql_ms": 1000 * median(took[1:]), "sql_mb": _peak_mb()}


def _opened(paths: RunPaths) -> Index:
    return opened(Index(paths, reach=Reach(policy_version=_newest_version(paths), max_policy_lag=MAX_POLICY_LAG)))


def _newest_version(paths: RunPaths) -> int:
    return recorded_steps(paths, _LINEAGE)[-1]


def _query(paths: RunPaths) -> SelectionQuery:
    """The query of the next step."""
    version = _newest_version(paths)
    return SelectionQuery(
        step=version + 1,
        policy_version=version,
        max_policy_lag=MAX_POLICY_LAG,
        start_groups=STEP_SHARDS,
        lineage=_LINEAGE,
        seed=0,
    )


def _peak_mb() -> float:
    # Not getrusage, whose peak begins with that of the process that started this one.
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    _folder, _first, _second = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    _work = {"make": make, "measure": measure, "sql": ask}[sys.argv[1]]
    sys.stdout.write(json.dumps(_work(_folder, _first, _second)) + "\n")
