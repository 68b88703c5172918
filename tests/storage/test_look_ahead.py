"""What is made ready ahead decides nothing, and a batch stays as it was handed out while anybody holds it."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from storage.gather import Batch
from storage.index import Index, open_index
from storage.ledger import write_ledger
from storage.packing import PackingBuffers
from storage.runs import RunPaths
from storage.selection import SelectionQuery
from storage.shards import open_shard

QUERY = SelectionQuery(step=1, policy_version=0, max_policy_lag=0, start_groups=2, seed=0)
ARRAYS = tuple(Batch.__slots__)


def assert_same(one: Batch, other: Batch) -> None:
    for name in ARRAYS:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def settled(index: Index) -> None:
    """Wait for what is being made ready."""
    work = index._ahead._work
    assert work is not None
    work.exception(timeout=60)


@pytest.fixture
def run(paths: RunPaths, publish: Callable[..., Any]) -> RunPaths:
    for first in (0, 2, 4):
        publish(range(first, first + 2), forks=6)
    return paths


def test_the_batch_made_ready_is_handed_over_if_the_step_chooses_its_very_rows(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, alone = Index(run), Index(run)
    index.look_ahead(QUERY)
    settled(index)
    monkeypatch.setattr("storage.index.gather", None)  # nothing is gathered again
    assert index.refresh() == 0, "what is new was taken in ahead"
    batch = index.gather(index.select_batch(QUERY).rows)
    monkeypatch.undo()
    alone.refresh()
    assert_same(batch, alone.gather(alone.select_batch(QUERY).rows))


def test_steps_that_look_ahead_train_on_the_rows_of_steps_that_do_not(paths: RunPaths, publish: Callable[..., Any]) -> None:
    """The whole dance of a trainer, three steps of it, while rows come in."""
    for first in range(0, 8, 2):
        publish(range(first, first + 2), forks=6)
    looking, plain = Index(paths), Index(paths)
    for step in (1, 2, 3):
        query = replace(QUERY, step=step)
        rows = []
        for index in (looking, plain):
            index.refresh()
            rows.append(index.select_batch(query).rows)
        assert rows[0].equals(rows[1]) and rows[0].num_rows
        assert_same(looking.gather(rows[0]), plain.gather(rows[1]))
        write_ledger(paths, step, rows[0], {})
        looking.look_ahead(replace(query, step=step + 1))
        publish(range(100 * step, 100 * step + 1), forks=6)


def test_damage_met_ahead_is_set_aside_and_the_step_chooses_without_it(run: RunPaths) -> None:
    index = open_index(run)
    rows = index.select_batch(QUERY).rows
    damaged = set(rows["shard"].to_pylist()).pop()
    flip_a_token(run.shards / damaged)
    index.look_ahead(QUERY)
    settled(index)
    index.refresh()
    again = index.select_batch(QUERY).rows
    assert damaged not in again["shard"].to_pylist() and again.num_rows
    assert [name for name, _ in index.refused] == [damaged]
    index.gather(again)


def test_an_error_that_is_none_of_the_data_is_not_lost(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    index = open_index(run)
    rows = index.select_batch(QUERY).rows
    monkeypatch.setattr("storage.index.gather", lambda *given: 1 / 0)
    index.look_ahead(QUERY)
    settled(index)
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError):
        index.gather(rows)
    index.gather(rows)


def test_a_batch_keeps_its_values_while_others_are_gathered(run: RunPaths) -> None:
    """Also if only a slice of one of its arrays is still held, or a view that somebody else made of it."""
    index = open_index(run)
    rows = index.select_batch(replace(QUERY, start_groups=6)).rows
    parts = [rows.slice(first, 20) for first in range(0, rows.num_rows - 20, 7)]
    expected = [Index(run).gather(part) for part in parts]
    held = [index.gather(part) for part in parts[:4]]
    slices = [index.gather(part).input_ids[5:40] for part in parts[:4]]
    views = [memoryview(index.gather(part).behaviour_logprobs) for part in parts[:4]]
    for part in parts:
        index.gather(part)
    for batch, right in zip(held, expected, strict=False):
        assert_same(batch, right)
    for some, right in zip(slices, expected, strict=False):
        assert np.array_equal(some, right.input_ids[5:40])
    for view, right in zip(views, expected, strict=False):
        assert np.array_equal(np.asarray(view), right.behaviour_logprobs)


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    buffers = PackingBuffers()
    first = buffers.arrays([(np.int32, 1000), (np.float32, 500)])
    place = first[0].ctypes.data
    part = first[1][10:20]
    del first
    second = buffers.arrays([(np.int32, 1000)])[0]
    assert second.ctypes.data != place, "a slice is still held"
    del part
    assert buffers.arrays([(np.int32, 1000)])[0].ctypes.data == place
    larger = buffers.arrays([(np.int32, 10_000)])[0]
    larger[:] = 7
    assert len(larger) == 10_000 and (second.size, second.ctypes.data != larger.ctypes.data) == (1000, True)


def test_arrays_of_one_batch_do_not_overlap_and_begin_where_their_type_may() -> None:
    arrays = PackingBuffers().arrays([(np.int32, 7), (np.float32, 0), (np.int64, 5), (np.int32, 3)])
    for place, array in enumerate(arrays):
        array[:] = place
        assert array.ctypes.data % 16 == arrays[0].ctypes.data % 16
    assert [array.tolist() for array in arrays] == [[0] * 7, [], [2] * 5, [3] * 3]


def test_several_threads_gather_from_one_index(run: RunPaths) -> None:
    """With fewer shards mapped than the rows lie in, so that shards come and go below the gathering."""
    index = Index(run)
    index._mapped._bound = 1
    index.refresh()
    rows = index.select_batch(replace(QUERY, start_groups=6)).rows
    mixed = [rows.take(pa.array(np.random.default_rng(seed).permutation(rows.num_rows))) for seed in range(4)]
    assert len(set(rows["shard"].to_pylist())) == 3
    expected = [Index(run).gather(some) for some in mixed]
    wrong: list[object] = []

    def gather_often(place: int) -> None:
        try:
            for _ in range(15):
                assert_same(index.gather(mixed[place]), expected[place])
        except BaseException as error:  # which would otherwise end in the thread
            wrong.append(error)

    threads = [threading.Thread(target=gather_often, args=(place,)) for place in range(len(mixed))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == [] and len(index._mapped) == 1


def flip_a_token(path: Path) -> None:
    """In place, below the mappings, as no one may."""
    tokens = np.asarray(open_shard(path)["input_ids"].chunk(0).values).tobytes()
    content = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        file.seek(content.index(tokens) + 8)
        file.write(bytes([content[file.tell()] ^ 4]))
