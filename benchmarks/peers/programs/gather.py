"""Gathers rows of a store of Lance or of Parquet: `python -m benchmarks.peers.programs.gather KIND STORE`.

KIND is `lance` or `parquet`. The rows are given by their numbers, so neither searches for them. Each gather reads the lists of a
batch and packs each into one flat array.
"""

import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.peers.programs.answer import serve

LISTS = ("input_ids", "behaviour_logprobs", "legal_ids", "legal_offsets")
SCALARS = ("decision_id", "prompt_len", "temperature", "policy_version")
COLUMNS = [*LISTS, *SCALARS]
FAR_MIB = 256
"""Size of the array that is read before a gather, so that no row is in a cache of the processor."""


def open_lance(store: str) -> Callable[[Sequence[int]], pa.Table]:
    """A reader of rows by number."""
    import lance  # pyright: ignore[reportMissingImports]  # only its own environment has it

    dataset = lance.dataset(store)
    return lambda rows: dataset.take(list(rows), columns=COLUMNS)


def open_parquet(store: str) -> Callable[[Sequence[int]], pa.Table]:
    """A reader of rows by number: it reads the row groups that hold them. The file's footer is read once, here."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(store, memory_map=True, pre_buffer=False)
    ends = np.cumsum([file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)])

    def read(rows: Sequence[int]) -> pa.Table:
        groups, place = np.unique(np.searchsorted(ends, rows, side="right"), return_inverse=True)
        sizes = np.diff(ends, prepend=0)[groups]
        begins = np.cumsum(sizes) - sizes
        within = np.asarray(rows) - (ends[groups] - sizes)[place] + begins[place]
        table = file.read_row_groups(groups.tolist(), columns=COLUMNS, use_threads=False)
        whole = len(within) == table.num_rows and bool((np.diff(within) == 1).all())
        return table if whole else table.take(pa.array(within))

    return read


def packed(table: pa.Table) -> dict[str, np.ndarray]:
    """Each column as one flat array."""
    found = {}
    for name in LISTS:
        column = table[name].combine_chunks()
        column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        found[name] = np.asarray(column.flatten())
    return found | {name: table[name].to_numpy() for name in SCALARS}


def main(kind: str, store: str) -> None:
    """Serve `gather`: given rows `few` to warm up and `rows` to measure; answers CPU seconds and a checksum of the tokens."""
    read = {"lance": open_lance, "parquet": open_parquet}[kind](store)
    far = np.ones(FAR_MIB * 2**20 // 8)

    def gather(given: Any) -> Mapping[str, Any]:
        far.sum()
        packed(read(given["few"]))
        began = time.process_time()
        arrays = packed(read(given["rows"]))
        spent = time.process_time() - began
        return {"cpu_s": spent, "rows": len(given["rows"]), "crc32": zlib.crc32(arrays["input_ids"].tobytes())}

    serve({"gather": gather})


if __name__ == "__main__":
    main(*sys.argv[1:3])
