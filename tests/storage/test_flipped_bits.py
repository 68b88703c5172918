"""One flipped bit anywhere in a used row is found before the row is used, and the run goes on without its shard."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from storage.arrow_files import map_arrow
from storage.gather import gather
from storage.index import open_index
from storage.mapped import MappedShards, ShardDamaged
from storage.packing import PackingBuffers
from storage.runs import RunPaths
from storage.schema import DECISION_SCHEMA, as_array
from storage.selection import SelectionQuery
from telemetry.errors import DataError

FLIPS = 200
QUERY = SelectionQuery(step=1, policy_version=0, max_policy_lag=0, start_groups=99, seed=0)


@pytest.fixture
def run(paths: RunPaths, publish: Callable[..., Any]) -> RunPaths:
    for first in (0, 2):
        publish(range(first, first + 2), forks=6)
    return paths


def flips(run: RunPaths, rows: pa.Table) -> Iterator[tuple[Path, str, int, int]]:
    """Of random used rows: their file, a column, and a byte and a bit in what that column has of the row."""
    rng = random.Random(11)
    pieces = {path: list(spans(path)) for path in sorted(run.shards.rglob("*.arrow")) if "plies" not in path.name}
    for number in range(FLIPS):
        used = rng.randrange(rows.num_rows)
        path, row = run.shards / rows["shard"][used].as_py(), rows["row"][used].as_py()
        mine = [(name, span) for name, of_row in pieces[path] for span in of_row(row) if len(span)]
        if number % 2:  # any byte, so mostly tokens
            ((name, span),) = rng.choices(mine, weights=[len(span) for _, span in mine])
        else:  # any column, each in its turn
            name, span = rng.choice(
                [piece for piece in mine if piece[0] == DECISION_SCHEMA.names[number // 2 % len(pieces[path])]]
            )
        yield path, name, rng.choice(span), rng.randrange(8)


def spans(path: Path) -> Iterator[tuple[str, Callable[[int], list[range]]]]:
    """For each column, where in the file the bytes of a row lie: its values, and what says where they begin and end."""
    content = pa.memory_map(str(path)).read_buffer()
    with pa.ipc.open_file(content) as reader:
        batch = reader.get_batch(0)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        yield name, lambda row, column=column: bytes_of(column, row, row + 1, content.address)


def bytes_of(column: pa.Array, first: int, after: int, base: int) -> list[range]:
    kind, buffers = column.type, column.buffers()

    def within(buffer: pa.Buffer, width: int, low: int, high: int) -> range:
        start = buffer.address - base
        return range(start + low * width, start + high * width)

    if pa.types.is_dictionary(kind):
        place = column.indices[first].as_py()
        return [*bytes_of(column.indices, first, after, base), *bytes_of(column.dictionary, place, place + 1, base)]
    if pa.types.is_string(kind) or pa.types.is_list(kind):
        ends = np.frombuffer(buffers[1], np.int32)
        low, high = int(ends[first]), int(ends[after])
        inner = bytes_of(column.values, low, high, base) if pa.types.is_list(kind) else [within(buffers[2], 1, low, high)]
        return [within(buffers[1], 4, first, after + 1), *inner]
    return [within(buffers[1], kind.byte_width, first, after)]


class Flipped:
    """A bit of a file changed in place, below all mappings, as no one may; whole again afterwards."""

    def __init__(self, path: Path, place: int, bit: int) -> None:
        self._path, self._place, self._bit = path, place, bit

    def __enter__(self) -> None:
        self._flip()

    def __exit__(self, *_: object) -> None:
        self._flip()

    def _flip(self) -> None:
        with self._path.open("r+b", buffering=0) as file:
            (value,) = os.pread(file.fileno(), 1, self._place)
            os.pwrite(file.fileno(), bytes([value ^ 1 << self._bit]), self._place)


def test_flips_are_of_every_column_and_of_used_rows(run: RunPaths) -> None:
    """What the other tests of this file rely on: each span holds what the row has in that column."""
    index = open_index(run)
    rows = index.select_batch(QUERY).rows
    assert {name for _, name, _, _ in flips(run, rows)} == set(DECISION_SCHEMA.names)
    path = run.shards / rows["shard"][0].as_py()
    file, content = map_arrow(path), path.read_bytes()
    for name, of_row in spans(path):
        row = rows["row"][0].as_py()
        texts = b"".join(content[span.start : span.stop] for span in of_row(row))
        value = as_array(file.table[name])[row].as_py()
        for piece in value if isinstance(value, list) and name == "orders" else [value]:
            wanted = piece.encode() if isinstance(piece, str) else np.array(piece, raw_type(name)).tobytes()
            assert wanted in texts, name


def raw_type(name: str) -> Any:
    kind = DECISION_SCHEMA.field(name).type
    return (kind.value_type if pa.types.is_list(kind) else kind).to_pandas_dtype()


def test_a_bit_flipped_in_a_mapped_shard_is_found_two_hundred_times_of_two_hundred(run: RunPaths) -> None:
    index = open_index(run)
    rows = index.select_batch(QUERY).rows
    shards, buffers = MappedShards(run.shards), PackingBuffers()
    whole = gather(rows, shards.get, buffers)
    found = []
    for path, name, place, bit in flips(run, rows):
        with Flipped(path, place, bit), pytest.raises(ShardDamaged) as refused:
            gather(rows, shards.get, buffers)
        found.append(name)
        assert refused.value.shard == str(path.relative_to(run.shards))
    again = gather(rows, shards.get, buffers)
    assert all(np.array_equal(getattr(again, name), getattr(whole, name)) for name in type(whole).__slots__)
    assert len(found) == FLIPS


def test_a_bit_flipped_before_a_shard_is_mapped_is_found_two_hundred_times_of_two_hundred(run: RunPaths) -> None:
    index = open_index(run)
    rows = index.select_batch(QUERY).rows
    found = 0
    for path, _, place, bit in flips(run, rows):
        with Flipped(path, place, bit), pytest.raises(DataError, match=path.name):
            gather(rows, MappedShards(run.shards).get, PackingBuffers())
        found += 1
    assert found == FLIPS


def test_the_shard_is_set_aside_and_the_batch_redrawn(run: RunPaths) -> None:
    whole = open_index(run)
    rows = whole.select_batch(QUERY).rows
    for path, _, place, bit in list(flips(run, rows))[:8]:
        index = open_index(run)
        name = str(path.relative_to(run.shards))
        with Flipped(path, place, bit):
            with pytest.raises(DataError, match=path.name):
                index.gather(rows)
            assert [refused for refused, _ in index.refused] == [name]
            again = index.select_batch(QUERY).rows
            assert set(again["shard"].to_pylist()) == set(rows["shard"].to_pylist()) - {name}
            assert len(index.gather(again).decision_ids) == again.num_rows > 0
