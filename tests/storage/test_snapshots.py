"""An index that opens from a snapshot is the index that opens from the shards, whatever became of either."""

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import snapshots
from storage.index import Index, open_index
from storage.ledger import write_ledger
from storage.parts import LARGE_ROWS, MERGED, choose_parts, read_parts
from storage.runs import RunPaths
from storage.selection import SelectionQuery
from storage.shards import map_shard
from storage.snapshots import IndexSnapshot, read_coverage, read_snapshot
from telemetry.errors import DataError
from tests.damage import flip

QUERY = SelectionQuery(step=1, policy_version=0, max_policy_lag=0, start_groups=99, seed=0)
BLEND = {"centres_gained": 1.0, "final_sos_share": -3.5}


def known(index: Index) -> list[Any]:
    """All that an index knows, but for the order in which it came to know it."""
    index.refresh()
    tables = ("decisions", "advantage_groups", "plies", "batches")
    return [index.connection.sql(f"FROM {table} ORDER BY ALL").to_arrow_table() for table in tables]


def snapshot_of(paths: RunPaths) -> Path:
    index = open_index(paths)
    written = index.snapshot_if_due(1)
    assert written is not None
    return written


def stored(paths: RunPaths) -> list[IndexSnapshot]:
    """The parts of the snapshot, oldest first."""
    parts, damaged = read_parts(paths.index)
    assert not damaged
    return [read_snapshot(part.path) for part in parts]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that are opened from here on."""
    names: list[str] = []
    for module in ("intake", "mapped"):
        monkeypatch.setattr(f"storage.{module}.map_shard", lambda path: names.append(path.name) or map_shard(path))
    return names


@pytest.fixture
def grown(paths: RunPaths, publish: Callable[..., Any]) -> RunPaths:
    """Three shards of two producers and one ledger in a snapshot, and a shard that came after it."""
    for first, producer in ((0, "p0"), (0, "p1"), (2, "p0")):
        publish(range(first, first + 2), producer, forks=4)
    index = open_index(paths)
    rows = index.select_batch(QUERY).rows
    assert rows.num_rows > 20
    write_ledger(paths, 1, rows.slice(0, 12), {})
    snapshot_of(paths)
    publish(range(4, 6), "p0", forks=4)
    return paths


@pytest.mark.parametrize("rule", [{}, {"blend": BLEND, "discount": 0.5}], ids=["default", "another blend"])
def test_an_index_from_a_snapshot_knows_what_one_from_the_shards_knows(grown: RunPaths, rule: Any, opened: list[str]) -> None:
    quick = known(Index(grown, **rule))
    assert opened == ["000004.arrow"]
    for file in grown.index.iterdir():
        file.unlink()
    grown.index.rmdir()
    slow = known(Index(grown, **rule))
    assert len(opened) == 5
    assert [one.equals(other) for one, other in zip(quick, slow, strict=True)] == [True] * 4
    assert quick[0].num_rows == 8 * 16 and quick[2].num_rows == 8 * 8


def test_a_start_group_that_a_snapshot_knows_is_not_taken_again(grown: RunPaths, publish: Callable[..., Any]) -> None:
    publish(range(3, 5), "p0")
    index = Index(grown)
    assert index.refresh() == 128
    assert [shard for shard, _ in index.refused] in (["p0/000003.arrow"], ["p0/000003.arrow", "p0/000004.arrow"])


def damage_rows(path: Path) -> None:
    """One bit, where a reader that does not check would read another value."""
    whole, content = pq.read_table(path), bytearray(path.read_bytes())
    for place in range(len(content) // 3, len(content)):
        content[place] ^= 16
        path.write_bytes(content)
        with suppress(pa.ArrowException, OSError):
            if not pq.read_table(path).equals(whole):
                return
        content[place] ^= 16
    raise AssertionError("no bit of the file matters")


def newer(path: Path) -> None:
    reseal(path, schema_version="99")


def other_shards(path: Path) -> None:
    """The list of shards changed, under the seal of the old one."""
    table = pq.read_table(path)
    metadata = {**table.schema.metadata, b"shards": b'{"p0":[]}'}
    pq.write_table(table.replace_schema_metadata(metadata), path)


def fewer_plies(path: Path) -> None:
    (plies,) = path.parent.glob(f"{path.stem}.*.plies.parquet")
    pq.write_table(pq.read_table(plies).slice(1), plies)


def other_values(path: Path) -> None:
    """A file that is sound in itself, of other rows."""
    table = pq.read_table(path)
    changed = pa.array([value + 1 for value in table["centres_gained"].to_pylist()], pa.float32())
    place = table.column_names.index("centres_gained")
    pq.write_table(table.set_column(place, table.schema.field(place), changed), path)


def reseal(path: Path, **changed: str) -> None:
    table = pq.read_table(path)
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()} | changed
    metadata["metadata_crc32"] = str(snapshots.metadata_crc(metadata))
    pq.write_table(table.replace_schema_metadata(metadata), path)


FAULTS = [damage_rows, newer, other_shards, fewer_plies, other_values]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_snapshot_that_is_not_whole_is_set_aside_with_a_sentence_and_the_one_before_is_used(
    grown: RunPaths, fault: Callable[[Path], None], opened: list[str]
) -> None:
    expected = known(Index(grown))
    newest = snapshot_of(grown)
    fault(newest)
    opened.clear()
    index = Index(grown)
    found = known(index)
    assert opened == ["000004.arrow"], "the older one does not cover the newest shard"
    assert [one.equals(other) for one, other in zip(found, expected, strict=True)] == [True] * 4
    ((name, sentence),) = index.refused
    assert name == f"index/{newest.name}" and newest.stem in sentence and sentence.endswith("remove the file.")
    index.gather(index.select_batch(QUERY).rows)
    for file in grown.index.glob("snap-000001.*"):
        file.unlink()
    opened.clear()
    assert [one.equals(other) for one, other in zip(known(Index(grown)), expected, strict=True)] == [True] * 4
    assert len(opened) == 4


def test_no_flipped_bit_of_a_snapshot_changes_what_an_index_knows(grown: RunPaths) -> None:
    path = snapshot_of(grown)
    (plies,) = path.parent.glob(f"{path.stem}.*.plies.parquet")
    whole, coverage = read_snapshot(path), read_coverage(path)
    rng = random.Random(1)
    found = 0
    for file in [path] * 40 + [plies] * 20:
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        try:
            assert read_coverage(path) == coverage
            read = read_snapshot(path)
            # else it is a bit that nobody reads, as in a statistic
            assert read.shards == whole.shards and read.decisions.equals(whole.decisions) and read.plies.equals(whole.plies)
        except DataError:
            found += 1
        file.write_bytes(content)
    assert found > 30


@pytest.mark.parametrize("change", ["gone", "replaced", "cut"])
def test_a_shard_that_changed_since_its_snapshot_is_read_anew(grown: RunPaths, publish: Callable[..., Any], change: str) -> None:
    path = grown.shards / "p0" / "000000.arrow"
    content = path.read_bytes()
    path.unlink()
    if change.startswith("replaced"):
        publish(range(2), "p0", forks=4)
    if change == "cut":
        path.write_bytes(content[:-100])
    index = Index(grown)
    found = known(index)
    for file in grown.index.iterdir():
        file.unlink()
    expected = known(Index(grown))
    assert [one.equals(other) for one, other in zip(found, expected, strict=True)] == [True] * 4
    assert len(index.refused) == (change == "cut")


def test_damage_below_a_snapshot_is_found_when_a_row_is_gathered(grown: RunPaths, publish: Callable[..., Any]) -> None:
    path = grown.shards / "p0" / "000000.arrow"
    marks = os.stat(path)
    flip(path)
    os.utime(path, ns=(marks.st_atime_ns, marks.st_mtime_ns))
    index = Index(grown)
    assert index.refresh() == 128 and index.refused == []
    rows = index.select_batch(QUERY).rows
    assert "p0/000000.arrow" in rows["shard"].to_pylist()
    with pytest.raises(DataError, match=r"000000\.arrow"):
        index.gather(rows)
    assert [shard for shard, _ in index.refused] == ["p0/000000.arrow"]
    rest = index.select_batch(QUERY).rows
    assert rest.num_rows and "p0/000000.arrow" not in rest["shard"].to_pylist()
    index.gather(rest)
    publish(range(2, 3), "p1")
    index.refresh()
    assert index.snapshot_if_due(1) is not None
    parts = stored(grown)
    assert {shard.name for part in parts for shard in part.shards} == {shard.name for shard in index.live()}
    assert all("p0/000000.arrow" not in part.decisions["shard"].to_pylist() for part in parts)
    late = open_index(grown)
    assert [shard for shard, _ in late.refused] == ["p0/000000.arrow"], "an index that opens reads the file itself"


def test_a_part_is_written_when_enough_shards_came_in_and_eight_become_one(paths: RunPaths, publish: Any) -> None:
    index, written, parts = Index(paths), list[bool](), list[list[int]]()
    for first in range(36):
        publish(range(first, first + 1), forks=1)
        index.refresh()
        written.append(index.snapshot_if_due(2) is not None)
        parts.append(sorted(part.rows for part in read_parts(paths.index)[0]))
    assert [number for number, done in enumerate(written, 1) if done] == list(range(2, 37, 2))
    assert parts[13] == [8] * 7 and parts[15] == [64], "eight parts of two shards, four rows each"
    assert parts[-1] == [8, 8, 64, 64] and len(list(paths.index.iterdir())) == 8
    assert stored(paths)[-1].shards == tuple(index.live()[-2:]), "a part has the new shards alone"
    again = Index(paths)
    assert again.refresh() == 36 * 4
    publish(range(36, 37), forks=1)
    again.refresh()
    assert again.snapshot_if_due(2) is None, "one came in since the newest part"
    assert again.snapshot_if_due(0) is None


def test_parts_of_one_size_class_are_merged_smallest_first_and_large_ones_never() -> None:
    assert choose_parts([]) == choose_parts([10] * (MERGED - 1)) == choose_parts([LARGE_ROWS] * 99) == []
    assert choose_parts([LARGE_ROWS, *[100] * MERGED, *[10] * MERGED, 10]) == list(range(1 + MERGED, 1 + 2 * MERGED))
    sizes, written = list[int](), 0
    for _ in range(20_000):  # parts of 2,688 rows, as a laptop run writes them
        sizes.append(2_688)
        written += 2_688
        while chosen := choose_parts(sizes):
            merged = sum(sizes[place] for place in chosen)
            sizes = [rows for place, rows in enumerate(sizes) if place not in chosen] + [merged]
            written += merged
    assert sum(sizes) == 20_000 * 2_688 and written <= 3 * sum(sizes), "a fact is written three times"
    assert max(sizes) <= 8 * LARGE_ROWS and len(sizes) <= 2 * (MERGED - 1) + sum(sizes) // LARGE_ROWS


def test_stock_duckdb_reads_it(grown: RunPaths) -> None:
    index = open_index(grown)
    snapshot_of(grown)
    files = f"'{grown.index}/snap-??????.parquet'"
    question = "SELECT power, policy_version, avg(centres_gained), count(*) FROM {} GROUP BY ALL ORDER BY ALL"
    with duckdb.connect() as stock:
        answer = stock.sql(question.format(files)).fetchall()
        assert len(answer) == 2 and answer == index.connection.sql(question.format("decisions")).fetchall()
        assert stock.sql(f"SELECT count(*) FROM '{grown.index}/snap-*.plies.parquet'").fetchall() == [(64,)]
        assert "return" not in stock.sql(f"FROM {files}").columns
