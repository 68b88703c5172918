"""A shard is published whole, once, with its own phases; and no damaged byte is ever read as data."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from entente.records.rows import PlayedPhase
from entente.telemetry.errors import DataError, InputError
from storage import arrow_files
from storage.index import Index
from storage.runs import RunPaths
from storage.shards import coverage, open_phases, open_shard, publish_shard, shard_names, shard_path
from tests.damage import flip

CODE = {"code": "1f3c"}


def test_rows_and_provenance_come_back_from_the_mapped_file(paths: RunPaths, rows: Any, rng: Any) -> None:
    decisions, phases = rows.make_shard_rows(rng, range(12, 14))
    shard = publish_shard(paths, "p0", 12, decisions, phases, CODE)
    assert shard.path == paths.shards / "p0" / "000012.arrow"
    assert (shard.next_start_group, shard.start_groups) == (14, (12, 13))
    before = pa.total_allocated_bytes()
    table = open_shard(shard.path)
    assert pa.total_allocated_bytes() == before
    fields = [name for name in table.column_names if name != "checksum"]
    groups = sorted(decisions, key=lambda row: (row.start_group, row.power, row.phase, row.fork, row.phase_index))
    assert table.select(fields).to_pylist() == [{name: getattr(row, name) for name in fields} for row in groups]
    assert open_phases(shard.path).to_pylist() == [
        {name: getattr(phase_row, name) for name in PlayedPhase.__slots__} for phase_row in phases
    ]
    assert table.schema.metadata[b"code"] == b"1f3c"


def test_of_two_attempts_at_once_one_wins_with_its_own_phases(
    paths: RunPaths, rows: Any, rng: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_decisions, slow_phases = rows.make_shard_rows(rng, range(1), forks=2)
    fast_decisions, fast_phases = rows.make_shard_rows(rng, range(1), forks=3)
    write, writes = arrow_files.write_arrow, []

    def overtaken(*arguments: Any) -> bool:
        writes.append(arguments)
        if len(writes) == 2:  # the slow attempt has published its phases and not its decisions
            publish_shard(paths, "p0", 0, fast_decisions, fast_phases, CODE)
        return write(*arguments)

    monkeypatch.setattr("storage.shards.write_arrow", overtaken)
    slow = publish_shard(paths, "p0", 0, slow_decisions, slow_phases, CODE)
    assert open_shard(slow.path).num_rows == len(fast_decisions)
    assert open_phases(slow.path).num_rows == len(fast_phases)
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
        decisions, phases = make_shard_rows(random.Random(), range(4), forks=8)
        publish_shard(paths, "p0", 0, decisions, phases, {{}})
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
    """Killed before its n-th sync, link or unlink: a folder, then phases, then decisions come into being."""
    paths = RunPaths(killed_writers / str(calls))
    index = Index(paths)
    seen = index.refresh()
    published = (paths.shards / "p0" / "000000.arrow").exists()
    assert published == (calls >= 7)
    assert (seen, index.refused) == (128 if published else 0, [])
    shard = publish_shard(paths, "p0", 0, *rows.make_shard_rows(rng, range(4), forks=7), CODE)
    forks = 8 if published else 7
    assert (open_shard(shard.path).num_rows, open_phases(shard.path).num_rows) == (16 * forks, 8 * forks)


def test_decisions_without_their_phases_are_set_aside(paths: RunPaths, publish: Callable[..., Any]) -> None:
    shard, _ = publish(range(1))
    shard.phases_path.unlink()
    index = Index(paths)
    assert index.refresh() == 0
    assert index.refused == [("p0/000000.arrow", f"{shard.phases_path} is missing.")]


@pytest.mark.parametrize("parts", [("phases_path",), ("path", "phases_path")])
def test_a_shard_with_damaged_phases_is_played_again_and_read(
    paths: RunPaths, rows: Any, rng: Any, parts: tuple[str, ...]
) -> None:
    decisions, phases = rows.make_shard_rows(rng, range(2))
    shard = publish_shard(paths, "p0", 0, decisions, phases, CODE)
    for part in parts:
        flip(getattr(shard, part))
    if len(parts) == 1:
        assert coverage(paths, "p0", 0, 2, {"p0/000000.arrow"}).missing == (), "a step that trained on it may be repeated"
    covered = coverage(paths, "p0", 0, 2)
    assert covered.missing == ((0, 2),) and "damaged" in covered.set_aside[0]
    publish_shard(paths, "p0", 0, decisions, phases, CODE)
    assert coverage(paths, "p0", 0, 2).missing == () and Index(paths).refresh() == len(decisions)


@pytest.mark.parametrize("name", ["p0/000007.arrow", "other/000000.arrow"])
def test_a_shard_under_another_name_is_set_aside_and_its_rows_count_once(
    paths: RunPaths, publish: Callable[..., Any], name: str
) -> None:
    shard, decisions = publish(range(1))
    copy = paths.shards / name
    copy.parent.mkdir(exist_ok=True)
    shutil.copyfile(shard.path, copy)
    if copy.parent != shard.path.parent:
        shutil.copyfile(shard.phases_path, copy.with_name(shard.phases_path.name))
    index = Index(paths)
    assert index.refresh() == len(decisions)
    ((refused, sentence),) = index.refused
    assert refused == name and "was written as p0/000000.arrow" in sentence


def test_phases_of_other_rows_are_not_read_under_a_shard_s_name(paths: RunPaths, publish: Callable[..., Any]) -> None:
    one, _ = publish(range(1))
    other, _ = publish(range(1, 2))
    one.phases_path.unlink()
    shutil.copyfile(other.phases_path, one.phases_path)
    with pytest.raises(DataError, match="does not have the phases of its name"):
        open_phases(one.path)


def test_rows_outside_the_shard_s_start_groups_are_refused(paths: RunPaths, rows: Any, rng: Any) -> None:
    decisions, phases = rows.make_shard_rows(rng, range(4, 6))
    for first, after in ((5, None), (4, 5)):
        with pytest.raises(InputError, match="start groups"):
            publish_shard(paths, "p0", first, decisions, phases, CODE, next_start_group=after)
    assert not (paths.shards / "p0").exists()


def test_start_groups_without_rows_still_lead_to_the_next_name(paths: RunPaths, rows: Any, rng: Any) -> None:
    assert publish_shard(paths, "p0", 0, [], [], CODE, next_start_group=4).next_start_group == 4
    decisions, phases = rows.make_shard_rows(rng, range(4, 5))
    assert publish_shard(paths, "p0", 4, decisions, phases, CODE, next_start_group=8).start_groups == (4,)
    assert Index(paths).refresh() == len(decisions)


def test_the_shards_of_a_run_with_more_than_a_million_start_groups_are_in_their_order(paths: RunPaths) -> None:
    numbers = [0, 999_996, 1_000_000, 1_000_004]
    (paths.shards / "p0").mkdir(parents=True)
    for number in numbers:
        shard_path(paths, "p0", number).touch()
    assert [int(Path(name).stem) for name in shard_names(paths)] == numbers
