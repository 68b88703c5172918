"""Writers killed anywhere, somebody reading all the while: whole shards or none, and none lost."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.index import open_index
from storage.runs import RunPaths
from storage.shards import open_phases, open_shard

ROOT = Path(__file__).parents[2]
FORKS, PER_GROUP = 6, 6 * 4  # forks, and decisions of a start group

WRITER = """
import os, random, sys
from pathlib import Path
from storage.runs import RunPaths
from storage.shards import publish_shard
from tests.storage.make_rows import make_shard_rows

paths = RunPaths(Path(sys.argv[1]))
print("ready", flush=True)
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    decisions, phases = make_shard_rows(random.Random(number), range(number, number + 1), sys.argv[4], forks=6)
    publish_shard(paths, sys.argv[4], number, decisions, phases, {})
    print(number, flush=True)
"""
READER = """
import sys, time
from pathlib import Path
from storage.index import open_index, Index
from storage.runs import RunPaths

paths = RunPaths(Path(sys.argv[1]))
followed, looks = Index(paths), 0
print("ready", flush=True)
known = set()
while not Path(sys.argv[2]).exists():
    index = followed if looks % 4 else Index(paths)
    index.refresh()
    groups = index.connection.sql("SELECT producer, start_group, count(*) FROM decisions GROUP BY ALL").fetchall()
    assert all(rows == 24 for _, _, rows in groups), groups
    assert not index.refused, index.refused
    now = {group[:2] for group in groups}
    assert known <= now, "a published shard was lost"
    phases = index.connection.sql("SELECT DISTINCT producer, start_group FROM phases").fetchall()
    assert set(phases) == now
    known, looks = now, looks + 1
    if now:
        index.gather(index.fresh_rows(policy_version=0, limit=5))
followed.refresh()
print(*followed.connection.sql("SELECT count(*) FROM decisions").fetchall()[0], looks, flush=True)
"""


@pytest.fixture
def start() -> Any:
    """Start a program; whatever still runs at the end is killed."""
    begun: list[subprocess.Popen[str]] = []

    def begin(program: str, *words: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *map(str, words)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        begun.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment))
        assert begun[-1].stdout is not None and begun[-1].stdout.readline() == "ready\n"
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def kill_one(paths: RunPaths, start: Callable[..., Any], first: int, rng: random.Random) -> list[int]:
    """Kill a writer at a random moment of publishing one shard after another; what it said it had published."""
    writer = start(WRITER, paths.root, first, 10**6, "p0")
    time.sleep(rng.uniform(0.0, 0.12))
    writer.send_signal(signal.SIGKILL)
    out, _ = writer.communicate()
    return [int(line) for line in out.splitlines()]


@pytest.mark.system
def test_writers_killed_at_any_moment_leave_whole_shards_and_lose_none_while_somebody_reads(
    paths: RunPaths, start: Callable[..., Any], tmp_path: Path
) -> None:
    rng, done, kills = random.Random(), tmp_path / "done", 6
    reader = start(READER, paths.root, done)
    said: set[int] = set()
    for _ in range(kills):
        said.update(kill_one(paths, start, max(said, default=-1) + 1, rng))
    done.touch()
    out, _ = reader.communicate(timeout=60)
    assert reader.returncode == 0, "the reader saw a part of a shard, or lost one"
    rows, looks = map(int, out.split())
    index = open_index(paths)
    published = {number for (number,) in index.connection.sql("SELECT DISTINCT start_group FROM decisions").fetchall()}
    assert said <= published and len(published - said) <= kills, "at most the last one of each was published and not said"
    assert index.refused == [] and rows == PER_GROUP * len(published) and looks > 3
    for number in published:
        shard = paths.shards / "p0" / f"{number:06d}.arrow"
        assert (open_shard(shard).num_rows, open_phases(shard).num_rows) == (PER_GROUP, FORKS * 2)


@pytest.mark.parametrize(
    ("what", "content"),
    [
        ("shard", b""),
        ("shard", b"ARROW1\0\0"),
        ("phases", b"\0" * 4096),
        ("ledger folder", b"{}"),
    ],
)
def test_a_foreign_file_among_them_is_named_and_the_rest_goes_on(
    paths: RunPaths, publish: Callable[..., Any], content: bytes, what: str
) -> None:
    shard, _ = publish(range(1))
    publish(range(1, 2))
    stranger = {
        "shard": shard.path.with_name("000009.arrow"),
        "phases": shard.phases_path,
        "ledger folder": paths.ledger / "notes.txt",
    }[what]
    stranger.parent.mkdir(exist_ok=True)
    stranger.unlink(missing_ok=True)
    stranger.write_bytes(content)
    index = open_index(paths)
    named = [name for name, _ in index.refused]
    expected = {"shard": ["p0/000009.arrow"], "phases": ["p0/000000.arrow"], "ledger folder": []}
    assert named == expected[what]
    assert index.connection.sql("SELECT count(*) FROM decisions").fetchall() == [(12 if what == "phases" else 24,)]
