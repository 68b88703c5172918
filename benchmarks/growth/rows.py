"""Growth with the rows of a run: opening an index, choosing and gathering a step's rows, attaching a shard, memory.

Each size is measured in a process of its own, after another one made the run. The facts of all rows but the gathered ones are
made up (`benchmarks/storage_rows.py`); their shards are empty files of 420 rows. The shards that are attached and gathered have
tokens. Four of ten advantage groups count as used, by one ledger. Times are CPU seconds of one thread. Memory is what the
process's resident memory (RSS) grew by, after the index was compressed, as a trainer does, and used.

    python -m benchmarks.growth.rows make FOLDER ROWS SEED
    python -m benchmarks.growth.rows measure FOLDER ROUNDS SEED
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil

from benchmarks.growth.steps import files_of
from benchmarks.outcome import require_found, timed
from benchmarks.storage_figures import STEP_SHARDS, opened, rows_of, run_of_facts, step_query, use_some_rows
from benchmarks.storage_rows import ROWS_PER_START_GROUP, VERSIONS, decisions_of, plies_of
from reports.growth import Growth
from storage.index import Index
from storage.runs import RunPaths
from storage.shards import publish_shard
from telemetry.errors import DataError
from telemetry.memory import give_back_memory, resident_mib
from telemetry.progress import reporter

SIZES, QUICK_SIZES = (10_000, 100_000, 1_000_000, 10_000_000), (10_000, 100_000, 1_000_000)
FIGURES = {
    "open_s": "opening the index, s",
    "compress_s": "compressing the index, s",
    "select_ms": "choosing a step's rows, ms",
    "attach_ms": "attaching a shard, ms",
    "gather_ms": "gathering 504 rows, ms",
    "index_mb": "memory of the index, MB RSS",
    "snapshot_mb": "snapshot on disk, MB",
}
PEAK_BYTES_PER_ROW = 1200
"""Memory of either process for each row, at most."""
_PRODUCER = "real"
_SHARD_GROUPS = 10


def measure_rows(sizes: Sequence[int], *, rounds: int, seed: int) -> Growth:
    """Measure each size that the free memory is enough for; a sentence names the others.

    Raises:
        DataError: a process failed.
    """
    points = {}
    for number, rows in enumerate(sizes):
        free = psutil.virtual_memory().available
        if rows * PEAK_BYTES_PER_ROW > free:
            needed = rows * PEAK_BYTES_PER_ROW / 1e9
            reporter().say(f"{rows:,} rows are left out: they need {needed:.0f} GB of memory, and {free / 1e9:.1f} GB are free")
            continue
        reporter().stage("sizes of a store", number, len(sizes))
        with TemporaryDirectory(prefix="entente-bench-") as folder:
            _run("make", folder, rows, seed)
            points[rows] = _run("measure", folder, rounds, seed)
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
    """Write a run of made-up facts; returns the rows that it has."""
    paths = run_of_facts(folder, rows, shard_groups=_SHARD_GROUPS, seed=seed)
    index = opened(Index(paths))
    use_some_rows(paths, index)
    return {"rows": index.totals().decisions}


def measure(folder: Path, rounds: int, seed: int) -> dict[str, float]:
    """The figures of the run in `folder`, to which some real shards are added."""
    with TemporaryDirectory() as empty:
        Index(RunPaths(Path(empty)).create()).refresh()  # loads what every index needs
    give_back_memory()
    before, paths = resident_mib(os.getpid()), RunPaths(folder)
    open_s, index = timed(lambda: opened(Index(paths)))
    compress_s = timed(index.compress)[0]
    attach = list[float]()
    for number in range(STEP_SHARDS):
        groups = range(number, number + 1)
        rows = decisions_of(groups, seed, VERSIONS - 1, _PRODUCER)
        publish_shard(paths, _PRODUCER, number, rows, plies_of(groups), {})
        took, taken = timed(index.refresh)
        require_found(taken == ROWS_PER_START_GROUP, "the rows of a new shard")
        attach.append(took)
    real = rows_of(index, _PRODUCER)
    select, gather = list[float](), list[float]()
    for step in range(rounds + 1):  # the first round warms up
        took, chosen = timed(lambda step=step: index.select_batch(step_query(step)))
        require_found(chosen.rows.num_rows, "a selection")
        select.append(took)
        took, batch = timed(lambda: index.gather(real))
        require_found(len(batch.input_ids), "the tokens of a batch")
        gather.append(took)
    give_back_memory()
    return {
        "open_s": open_s,
        "compress_s": compress_s,
        "select_ms": 1000 * median(select[1:]),
        "attach_ms": 1000 * median(attach[1:]),
        "gather_ms": 1000 * median(gather[1:]),
        "index_mb": (resident_mib(os.getpid()) - before) * 2**20 / 1e6,
        "snapshot_mb": files_of(paths.index)[1],
    }


if __name__ == "__main__":
    _folder, _first, _second = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    sys.stdout.write(json.dumps((make if sys.argv[1] == "make" else measure)(_folder, _first, _second)) + "\n")
