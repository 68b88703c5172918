"""A shard is published whole, once, with its own plies; and no damaged byte is ever read as data."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from entente.records.rows import Ply
from entente.telemetry.errors import DataError, InputError
from storage import arrow_files
from storage.arrow_files import SCHEMA_VERSION
from storage.index import Index
from storage.runs import RunPaths
from storage.shards import open_plies, open_shard, publish_shard

CODE = {"code": "1f3c"}


def test_rows_and_provenance_come_back_from_the_mapped_file(paths: RunPaths, rows: Any, rng: Any) -> None:
    decisions, plies = rows.make_shard_rows(rng, range(12, 14))
    shard = publish_shard(paths, "p0", 12, decisions, plies, CODE)
    assert shard.path == paths.shards / "p0" / "000012.arrow"
    assert (shard.first_start_group, shard.next_start_group, shard.start_groups, shard.already) == (
        12,
        14,
        (12, 13),
        False,
    )
    before = pa.total_allocated_bytes()
    table = open_shard(shard.path)
    assert pa.total_allocated_bytes() == before
    fields = [name for name in table.column_names if name != "checksum"]
    groups = sorted(decisions, key=lambda row: (row.start_group, row.power, row.phase, row.fork, row.ply))
    assert table.select(fields).to_pylist() == [{name: getattr(row, name) for name in fields} for row in groups]
    assert open_plies(shard.path).to_pylist() == [{name: getattr(ply, name) for name in Ply.__slots__} for ply in plies]
    assert table.schema.metadata[b"code"] == b"1f3c"


def test_a_repeated_publication_loses_quietly(paths: RunPaths, publish: Callable[..., Any]) -> None:
    first, decisions = publish(range(3, 5))
    folder = {path: path.read_bytes() for path in first.path.parent.iterdir()}
    again, others = publish(range(3, 5))
    assert again.already and not first.already
    assert (again.path, again.plies_path, again.start_groups) == (first.path, first.plies_path, (3, 4))
    assert {path: path.read_bytes() for path in first.path.parent.iterdir()} == folder
    seeds = {row.seed for row in decisions}
    assert set(open_shard(first.path)["seed"].to_pylist()) == seeds != {row.seed for row in others}


def test_of_two_attempts_at_once_one_wins_with_its_own_plies(
    paths: RunPaths, rows: Any, rng: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_decisions, slow_plies = rows.make_shard_rows(rng, range(1), forks=2)
    fast_decisions, fast_plies = rows.make_shard_rows(rng, range(1), forks=3)
    write, writes = arrow_files.write_arrow, []

    def overtaken(*arguments: Any) -> bool:
        writes.append(arguments)
        if len(writes) == 2:  # the slow attempt has published its plies and not its decisions
            publish_shard(paths, "p0", 0, fast_decisions, fast_plies, CODE)
        return write(*arguments)

    monkeypatch.setattr("storage.shards.write_arrow", overtaken)
    slow = publish_shard(paths, "p0", 0, slow_decisions, slow_plies, CODE)
    assert slow.already
    assert open_shard(slow.path).num_rows == len(fast_decisions)
    assert open_plies(slow.path).num_rows == len(fast_plies)
    assert len(list(slow.path.parent.iterdir())) == 2


KILLS = (0, 3, 6, 7, 8)
WRITERS = f"""
import os, random, signal, sys
from pathlib import Path
from storage.runs import RunPaths
from storage.shards import publish_shard
from tests.storage.make_rows import make_shard_rows

def dying(call):
    def wrapped(*arguments, **named):
        global calls_left
        if calls_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        calls_left -= 1
        return call(*arguments, **named)
    return wrapped

for calls_left in {list(KILLS)}:
    paths = RunPaths(Path(sys.argv[1]) / str(calls_left)).create()
    if (child := os.fork()) == 0:
        os.fsync, os.link, os.unlink = dying(os.fsync), dying(os.link), dying(os.unlink)
        decisions, plies = make_shard_rows(random.Random(), range(4), forks=8)
        publish_shard(paths, "p0", 0, decisions, plies, {{}})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, calls_left
"""


@pytest.fixture(scope="module")
def killed_writers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: in run n the writer was killed before its n-th sync, link or unlink. One interpreter forks them all."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", WRITERS, str(folder)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, env={"PYTHONPATH": "."}, timeout=120)
    return folder


@pytest.mark.system
@pytest.mark.parametrize("calls", KILLS)
def test_a_killed_writer_leaves_a_whole_shard_or_none_and_a_retry_mends_it(
    killed_writers: Path, rows: Any, rng: Any, calls: int
) -> None:
    """Killed before its n-th sync, link or unlink: a folder, then plies, then decisions come into being."""
    paths = RunPaths(killed_writers / str(calls))
    index = Index(paths)
    seen = index.refresh()
    published = (paths.shards / "p0" / "000000.arrow").exists()
    assert published == (calls >= 7)
    assert (seen, index.refused) == (128 if published else 0, [])
    shard = publish_shard(paths, "p0", 0, *rows.make_shard_rows(rng, range(4), forks=7), CODE)
    assert shard.already == published
    forks = 8 if published else 7
    assert (open_shard(shard.path).num_rows, open_plies(shard.path).num_rows) == (16 * forks, 8 * forks)


def test_decisions_without_their_plies_are_set_aside(paths: RunPaths, publish: Callable[..., Any]) -> None:
    shard, _ = publish(range(1))
    shard.plies_path.unlink()
    index = Index(paths)
    assert index.refresh() == 0
    assert index.refused == [("p0/000000.arrow", f"{shard.plies_path} is missing.")]


@pytest.mark.parametrize("of_plies", [False, True], ids=["decisions", "plies"])
def test_no_flipped_byte_is_read_as_data(publish: Callable[..., Any], of_plies: bool) -> None:
    """Wherever a byte of the file is flipped, reading refuses it, or nothing that is read has changed."""
    shard, _ = publish(range(1), forks=2)
    path = shard.plies_path if of_plies else shard.path
    whole = path.read_bytes()
    expected = open_plies(shard.path) if of_plies else open_shard(shard.path)
    contents, metadata = expected.to_pylist(), expected.schema.metadata
    del expected
    data = _data_bytes(path)
    assert len(data) > 400
    for place in sorted({*data[::41], *range(0, len(whole), 101)}):
        path.unlink()  # a new file each time: a mapped one is never changed in place
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            read = open_plies(shard.path) if of_plies else open_shard(path)
        except DataError as error:
            assert path.name in str(error)
        else:
            assert place not in data, f"byte {place} of a row was flipped and nobody noticed"
            assert (read.to_pylist(), read.schema.metadata) == (contents, metadata)


def _data_bytes(path: Path) -> list[int]:
    """Positions in the file of every byte that belongs to a value, length or text of a row; not padding."""
    source = pa.memory_map(str(path))
    base = source.read_buffer().address
    source.seek(0)
    found: list[int] = []
    pending = [column.chunk(0) for column in pa.ipc.open_file(source).read_all().columns]
    while pending:
        array = pending.pop()
        kind = array.type
        if pa.types.is_dictionary(kind):
            pending += [array.indices, array.dictionary]
            continue
        sizes = {1: len(array) * kind.bit_width // 8} if pa.types.is_primitive(kind) else {1: 4 * (len(array) + 1)}
        if pa.types.is_list(kind):
            pending.append(array.values)
        if pa.types.is_string(kind):
            sizes[2] = sum(len(text.encode()) for text in array.to_pylist())
        for number, size in sizes.items():
            buffer = array.buffers()[number]
            found += range(buffer.address - base, buffer.address - base + size) if size else []
    assert max(found) < path.stat().st_size
    return sorted(found)


def test_a_file_with_nulls_is_refused(tmp_path: Path) -> None:
    assert arrow_files.write_arrow(pa.table({"a": ["x", None]}), tmp_path / "a.arrow", {})
    with pytest.raises(DataError, match="holds nulls"):
        arrow_files.map_arrow(tmp_path / "a.arrow")


def test_another_schema_version_is_refused_by_its_number(publish: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_files, "SCHEMA_VERSION", 99)
    shard, _ = publish(range(1), producer="future")
    monkeypatch.undo()
    with pytest.raises(DataError, match=f"has schema version 99, this program reads {SCHEMA_VERSION}"):
        open_shard(shard.path)


def test_rows_outside_the_shard_s_start_groups_are_refused(paths: RunPaths, rows: Any, rng: Any) -> None:
    decisions, plies = rows.make_shard_rows(rng, range(4, 6))
    for first, after in ((5, None), (4, 5)):
        with pytest.raises(InputError, match="start groups"):
            publish_shard(paths, "p0", first, decisions, plies, CODE, next_start_group=after)
    assert not (paths.shards / "p0").exists()


def test_start_groups_without_rows_still_lead_to_the_next_name(paths: RunPaths, rows: Any, rng: Any) -> None:
    assert publish_shard(paths, "p0", 0, [], [], CODE, next_start_group=4).next_start_group == 4
    decisions, plies = rows.make_shard_rows(rng, range(4, 5))
    assert publish_shard(paths, "p0", 4, decisions, plies, CODE, next_start_group=8).start_groups == (4,)
    assert Index(paths).refresh() == len(decisions)
