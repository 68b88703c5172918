"""On a full disk what was played waits in memory, and is published whole once there is room."""

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from entente.records.rows import PlayedPhase
from entente.rollouts.groups import publish_when_there_is_room
from storage.index import open_index
from storage.runs import RunPaths
from storage.shards import publish_shard

GIVEN_S = 30.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A real disk of one megabyte, all but full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("a small disk of its own can be mounted by root only")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "entente-test", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        RunPaths(folder / "run").create()
        (folder / "ballast").write_bytes(b"\0" * 900_000)
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def phases() -> list[PlayedPhase]:
    """Some 400 kB."""
    text = dict.fromkeys(("orders", "results"), "{}") | {"snapshot_id": "0" * 16, "phase": "S1901M", "position": "x" * 20_000}
    return [PlayedPhase(start_group=0, fork=fork, phase_index=0, **text) for fork in range(20)]


def publish(disk: Path):
    return partial(publish_shard, RunPaths(disk / "run"), "p0", 0, [], phases(), {}, next_start_group=1)


def test_it_waits_for_room_and_then_all_is_there(disk: Path) -> None:
    room = threading.Timer(1.0, (disk / "ballast").unlink)
    room.start()
    try:
        shard = asyncio.run(publish_when_there_is_room(publish(disk), GIVEN_S))
    finally:
        room.join()
    assert shard.path.is_file()
    index = open_index(RunPaths(disk / "run"))
    assert index.refused == [] and index.connection.sql("SELECT count(*) FROM phases").fetchall() == [(20,)]
