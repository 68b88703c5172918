"""An index that opens from a snapshot is the index that opens from the shards, whatever became of either."""

import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.storage_figures import run_of_facts, step_query
from storage import snapshots
from storage.index import Index, open_index
from storage.ledger import write_ledger
from storage.parts import LARGE_ROWS, MERGED, choose_parts, read_parts
from storage.runs import RunPaths
from storage.selection import Reach, SelectionQuery
from storage.shards import map_shard
from storage.snapshots import IndexSnapshot, read_coverage, read_snapshot, snapshot_files, write_snapshot
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


def test_facts_in_many_chunks_are_written_and_read_like_facts_in_one(grown: RunPaths, tmp_path: Path) -> None:
    index = open_index(grown)
    whole = index.snapshot_of([shard for name in ("000000", "000002") if (shard := index.find_shard(f"p0/{name}.arrow"))])
    rows = whole.decisions.num_rows
    chunked = replace(whole, decisions=pa.concat_tables([whole.decisions.slice(at, 5) for at in range(0, rows, 5)]))
    assert chunked.decisions["shard"].num_chunks > 3
    written = write_snapshot(tmp_path, chunked)
    assert written is not None
    assert read_snapshot(written).decisions.equals(whole.decisions.combine_chunks())


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


def test_both_ways_choose_and_gather_the_same_and_go_on_the_same(grown: RunPaths, publish: Callable[..., Any]) -> None:
    quick = Index(grown)
    assert quick.refresh() == 128 and quick.refused == []
    for file in grown.index.iterdir():
        file.unlink()
    slow = Index(grown)
    assert slow.refresh() == 128
    publish(range(6, 8))
    for index in (quick, slow):
        assert index.refresh() == 24
    chosen = [index.select_batch(QUERY) for index in (quick, slow)]
    assert chosen[0].rows.equals(chosen[1].rows) and chosen[0].counts == chosen[1].counts
    assert quick.gather(chosen[0].rows).input_ids.tolist() == slow.gather(chosen[1].rows).input_ids.tolist()


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


def damage_shard(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 16
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), path)


def newer(path: Path) -> None:
    reseal(path, schema_version="99")


def other_shards(path: Path) -> None:
    """The list of shards changed, under the seal of the old one."""
    table = pq.read_table(path)
    metadata = {**table.schema.metadata, b"shards": b'{"p0":[]}'}
    pq.write_table(table.replace_schema_metadata(metadata), path)


def without_plies(path: Path) -> None:
    (plies,) = path.parent.glob(f"{path.stem}.*.plies.parquet")
    plies.unlink()


def fewer_plies(path: Path) -> None:
    (plies,) = path.parent.glob(f"{path.stem}.*.plies.parquet")
    pq.write_table(pq.read_table(plies).slice(1), plies)


def other_columns(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.rename_columns(["x", *table.column_names[1:]]), path)


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


FAULTS = [damage_rows, cut, empty, foreign, newer, other_shards, without_plies, fewer_plies, other_columns, other_values]


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
    for file in [path] * 90 + [plies] * 30:
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
    assert found > 60


@pytest.mark.parametrize("change", ["gone", "replaced", "replaced, same size", "cut"])
def test_a_shard_that_changed_since_its_snapshot_is_read_anew(grown: RunPaths, publish: Callable[..., Any], change: str) -> None:
    path = grown.shards / "p0" / "000000.arrow"
    before = os.stat(path)
    content = path.read_bytes()
    path.unlink()
    if change.startswith("replaced"):
        publish(range(2), "p0", forks=4 if change.endswith("size") else 2)
    if change == "cut":
        path.write_bytes(content[:-100])
    if change == "replaced, same size":
        assert abs(os.stat(path).st_size - before.st_size) < 2000
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


def test_whoever_asks_for_whole_shards_learns_of_damage_below_a_snapshot(grown: RunPaths) -> None:
    path = grown.shards / "p0" / "000002.arrow"
    marks = os.stat(path)
    damage_shard(path)
    os.utime(path, ns=(marks.st_atime_ns, marks.st_mtime_ns))
    index = Index(grown)
    assert index.refresh() == 128
    tables = index.verified_shards()
    assert [shard for shard, _ in index.refused] == ["p0/000002.arrow"]
    ids = [number for table in tables for number in table["decision_id"].to_pylist()]
    rows = index.connection.sql('SELECT decision_id FROM decisions ORDER BY shard, "row"').fetchall()
    assert ids == [number for (number,) in rows] and len(ids) == 96


def test_a_shard_that_was_set_aside_enters_no_snapshot(grown: RunPaths, publish: Callable[..., Any]) -> None:
    publish(range(2, 3), "p1")
    damaged = grown.shards / "p0" / "000004.arrow"
    damage_shard(damaged)
    snapshot_of(grown)
    covered = {shard.name for part in stored(grown) for shard in part.shards}
    assert covered == {"p0/000000.arrow", "p0/000002.arrow", "p1/000000.arrow", "p1/000002.arrow"}
    assert {name for part in stored(grown) for name in part.decisions["shard"].to_pylist()} == covered


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


def test_a_run_of_an_earlier_version_opens_and_goes_on(grown: RunPaths, publish: Any, opened: list[str]) -> None:
    """Its newest snapshot covered all shards, and so did the one before; neither named the versions of their rows."""
    expected = known(Index(grown))
    whole = open_index(grown)
    everything = whole.snapshot_of(whole.live())
    for file in grown.index.iterdir():
        file.unlink()
    for covered in (everything.shards[:3], everything.shards):
        path = write_snapshot(grown.index, everything.subset(covered))
        assert path is not None
        table = pq.read_table(path)
        metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
        del metadata["newest_versions"]
        metadata["metadata_crc32"] = str(snapshots.metadata_crc(metadata))
        pq.write_table(table.replace_schema_metadata(metadata), path)
    opened.clear()
    for reach in (None, Reach(policy_version=0, max_policy_lag=0)):
        index = Index(grown, reach=reach)
        assert [one.equals(other) for one, other in zip(known(index), expected, strict=True)] == [True] * 4
    assert opened == []
    publish(range(6, 7), "p0")
    index.refresh()
    assert index.snapshot_if_due(1) is not None
    assert [path.name for _, path in snapshot_files(grown.index)] == [f"snap-00000{number}.parquet" for number in (3, 4, 5)]


def test_an_index_that_is_kept_is_compressed_and_chooses_the_same(tmp_path: Path) -> None:
    index = open_index(run_of_facts(tmp_path, 42_000, shard_groups=100, seed=0))
    chosen = index.select_batch(step_query(1)).rows
    memory = "SELECT sum(memory_usage_bytes) FROM duckdb_memory()"
    before = index.fetch(memory)[0][0]
    assert index.snapshot_if_due(99) is None
    assert index.fetch(memory)[0][0] < before / 4
    assert chosen.num_rows and index.select_batch(step_query(1)).rows.equals(chosen)


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


def test_who_comes_second_to_a_number_leaves_the_file_of_the_first(grown: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = stored(grown)
    before = {file: file.read_bytes() for file in grown.index.iterdir()}
    monkeypatch.setattr(snapshots, "_numbers", lambda folder: set())
    assert write_snapshot(grown.index, found) is None
    assert {file: file.read_bytes() for file in grown.index.iterdir()} == before


@pytest.mark.parametrize("left", [".snap-000009.parquet.1-00000000.tmp", "snap-000009.00000000.plies.parquet", "snap-9.parquet"])
def test_what_a_killed_writer_leaves_is_no_snapshot(grown: RunPaths, left: str) -> None:
    (grown.index / left).write_bytes(b"half")
    index = Index(grown)
    assert index.refresh() == 128 and index.refused == []
    assert snapshot_of(grown).name in ("snap-000002.parquet", "snap-000010.parquet")
