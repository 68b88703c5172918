"""`lance_gather`, `parquet_gather`: the 504 rows of a step out of a store of 100,000, beside our gather.

All arms read the same whole start groups, chosen at random, of the same rows. Ours has its shards, one start group each, mapped
and verified, and compares each shard's bytes with a hash before it uses them. Lance and Parquet check nothing, and are given the
numbers of the rows. Parquet has one row group for each start group, without compression or dictionaries. Files are in the page
cache; no row is in a cache of the processor.
"""

import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.outcome import require_found, timed_cold
from benchmarks.peers.child import ROOT, Child, PeerError
from benchmarks.peers.environments import python_of
from benchmarks.peers.programs.gather import COLUMNS, FAR_MIB
from benchmarks.peers.turns import OURS, Arm, middle, ratio, take_turns
from benchmarks.storage_figures import STEP_SHARDS
from benchmarks.storage_rows import ROWS_PER_START_GROUP, decisions_of, plies_of
from storage.index import Index
from storage.ledger import ROWS_SCHEMA
from storage.runs import RunPaths
from storage.shards import open_shard, publish_shard
from telemetry.progress import reporter

ROWS, QUICK_ROWS = 100_000, 10_000
_KINDS = {"lance_gather": "lance", "parquet_gather": "parquet"}


def gather_figures(figures: Sequence[str], environments: Path, *, rounds: int, seed: int, quick: bool) -> dict[str, float]:
    """The ratios of `figures`, and milliseconds of each arm.

    A figure with `_unmapped` compares with a gather that first maps and verifies its shards, which a run does ahead in a thread.
    """
    with tempfile.TemporaryDirectory(prefix="entente-peers-") as folder, ExitStack() as children:
        groups = (QUICK_ROWS if quick else ROWS) // ROWS_PER_START_GROUP
        store = _Store(Path(folder), groups, seed)
        arms: dict[str, Arm] = {OURS: store.gather}
        for figure in figures:
            python = python_of(figure, environments)
            child = Child(python, "gather", _KINDS[figure], str(store.write(_KINDS[figure], python)))
            children.callback(child.close)
            arms[figure] = lambda number, child=child: _their_gather(child, store, number)
        turns = take_turns(arms, rounds, "gather")
    unmapped_s = median(store.unmapped_s[1:])
    found = {figure: ratio(turns, figure) for figure in figures}
    found |= {f"{figure}_unmapped": middle(turns, figure) / unmapped_s for figure in figures}
    found |= {f"{arm.removesuffix('_gather')}_gather_ms": 1e3 * middle(turns, arm) for arm in arms}
    return found | {"ours_unmapped_gather_ms": 1e3 * unmapped_s}


class _Store:
    """The same rows as shards of a run, and as files of the peers."""

    def __init__(self, folder: Path, groups: int, seed: int) -> None:
        self._folder, self._groups, self._seed = folder, groups, seed
        paths = RunPaths(folder / "run").create()
        for number in range(groups):
            some = range(number, number + 1)
            publish_shard(paths, "bench", number, decisions_of(some, seed), plies_of(some), {})
            reporter().stage("rows of the store", number + 1, groups)
        self._index = Index(paths)
        self._index.refresh()
        self._rows = _rows_of(self._index)
        self._far = np.ones(FAR_MIB * 2**20 // 8)
        self._arrow = folder / "rows.arrow"
        self._write_arrow(paths)
        self.checksums: dict[int, int] = {}
        self.unmapped_s: list[float] = []

    def _write_arrow(self, paths: RunPaths) -> None:
        """All rows in the order of start groups, with the columns that a gather reads."""
        sink = None
        for number in range(self._groups):
            table = open_shard(paths.shards / f"bench/{number:06d}.arrow").select(COLUMNS).replace_schema_metadata(None)
            sink = sink or pa.ipc.new_file(str(self._arrow), table.schema)
            sink.write_table(table)
        require_found(sink, "rows of a store")
        assert sink is not None
        sink.close()

    def write(self, kind: str, python: Path) -> Path:
        """The store of a peer.

        Raises:
            PeerError: the peer could not write it.
        """
        if kind == "parquet":
            final = self._folder / "rows.parquet"
            with pa.memory_map(str(self._arrow)) as source:
                rows = pa.ipc.open_file(source).read_all()
                pq.write_table(
                    rows,
                    final,
                    row_group_size=ROWS_PER_START_GROUP,
                    compression="none",
                    use_dictionary=False,
                    write_page_index=True,
                )
            return final
        final = self._folder / "rows.lance"
        command = [str(python), "-m", "benchmarks.peers.programs.write_lance", str(self._arrow), str(final)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)})
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
            raise PeerError(f"Lance could not write the store: {last}")
        return final

    def numbers(self, number: int) -> list[int]:
        """Row numbers of round `number`: STEP_SHARDS whole start groups, in order. The first group is for warming up."""
        dice = np.random.default_rng([self._seed, number])
        groups = np.sort(1 + dice.permutation(self._groups - 1)[:STEP_SHARDS])
        return (groups[:, None] * ROWS_PER_START_GROUP + np.arange(ROWS_PER_START_GROUP)).ravel().tolist()

    def gather(self, number: int) -> float:
        """CPU seconds of our gather. The shards were mapped and verified before, as by a trainer's look ahead."""
        rows, few = self._rows.take(pa.array(self.numbers(number))), self._rows.slice(0, 3)
        self.unmapped_s.append(timed_cold(lambda: self._index.gather(rows), self._far, lambda: self._index.gather(few))[0])
        spent, batch = timed_cold(lambda: self._index.gather(rows), self._far, lambda: self._index.gather(few))
        self.checksums[number] = zlib.crc32(batch.input_ids.tobytes())
        return spent


def _their_gather(child: Child, store: _Store, number: int) -> float:
    answer = child.request("gather", {"few": [0, 1, 2], "rows": store.numbers(number)})
    require_found(answer["crc32"] == store.checksums.setdefault(number, answer["crc32"]), "the same tokens in a peer's store")
    return answer["cpu_s"]


def _rows_of(index: Index) -> pa.Table:
    """All rows in the order in which they were published."""
    query = (
        'SELECT shard, "row", decision_id, start_group, fork, ply, power, phase, policy_version, 0::INTEGER AS policy_lag, '
        'checksum, "return", (-1)::INTEGER AS advantage_group FROM decisions ORDER BY start_group, "row"'
    )
    return index.connection.sql(query).to_arrow_table().cast(ROWS_SCHEMA).combine_chunks()
