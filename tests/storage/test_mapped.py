"""However many shards a run has, few are mapped at a time, and reading one costs no heap."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage.gather import MappedShards, ShardDamaged, gather
from storage.index import Index, open_index
from storage.runs import RunPaths

MAPS = Path("/proc/self/maps")


def mappings(paths: RunPaths) -> int:
    """Files of the run's shards that this process has mapped."""
    return sum(str(paths.shards) in line for line in MAPS.read_text().splitlines())


@pytest.mark.skipif(not MAPS.exists(), reason="only Linux lists a process's mappings")
def test_no_more_shards_are_mapped_than_the_bound(paths: RunPaths, publish: Callable[..., Any]) -> None:
    for first in range(6):
        publish(range(first, first + 1), forks=6)
    index = Index(paths)
    index._mapped._bound = 4
    assert index.refresh() == 6 * 24
    assert mappings(paths) <= 4, "taking shards in maps them, and lets go of them again"
    rows = index.fresh_rows(policy_version=0, limit=10_000)
    assert len(set(rows["shard"].to_pylist())) == 6
    batch = index.gather(rows)
    assert (len(batch.decision_ids), len(index._mapped)) == (rows.num_rows, 4)
    assert mappings(paths) <= 4


def test_the_shards_asked_for_last_stay_mapped(paths: RunPaths, publish: Callable[..., Any]) -> None:
    """One that was let go is read on by who holds it, also after retention took the file away."""
    names = [f"p0/{first:06d}.arrow" for first in range(3)]
    for first in range(3):
        publish(range(first, first + 1))
    shards = MappedShards(paths.shards, bound=2)
    first, second, _ = shards.get(names[0]), shards.get(names[1]), shards.get(names[0])
    before = second.table["decision_id"].to_pylist()
    shards.get(names[2])
    assert shards.get(names[0]) is first
    (paths.shards / names[1]).unlink()
    assert second.is_unchanged() and second.table["decision_id"].to_pylist() == before
    with pytest.raises(ShardDamaged, match=r"000001\.arrow is missing"):
        shards.get(names[1])


def test_gathering_takes_no_heap_of_arrows_and_copies_nothing_but_the_batch(paths: RunPaths, publish: Callable[..., Any]) -> None:
    publish(range(3), forks=6)
    index = open_index(paths)
    rows = index.fresh_rows(policy_version=0, limit=10_000)
    shards = MappedShards(paths.shards)
    before = pa.total_allocated_bytes()
    assert not shards.get("p0/000000.arrow").table["input_ids"].chunk(0).values.to_numpy().flags.owndata
    assert pa.total_allocated_bytes() == before
    batch = gather(rows, shards.get)
    assert pa.total_allocated_bytes() == before
    assert batch.input_ids.flags.writeable and batch.input_ids.flags.owndata
