"""Rollouts on a Dask cluster of two processes, one of which is killed half-way; that costs time and nothing else."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.ipc
import pytest

from storage.runs import RunPaths
from storage.shards import open_shard

ROOT = Path(__file__).resolve().parents[2]
OVERLAPPED = ("--pipeline.buffer-depth", "1", "--rollouts.start-groups", "4", "--inference.engine", "torch")
"""Four tasks at a time, as many as two processes take, so that both have some."""

pytestmark = pytest.mark.slow


def wait(seconds: float, what: str, done: Callable[[], Any], *alive: subprocess.Popen[Any]) -> Any:
    """The first true answer of `done`, while these processes live."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for process in alive:
            assert process.poll() is None, f"while waiting for {what}, {process.args} ended"
        if answer := done():
            return answer
        time.sleep(0.2)
    raise AssertionError(f"{what} took more than {seconds} s")


def shards(paths: RunPaths) -> list[Path]:
    return [
        file
        for file in sorted(paths.shards.rglob("*.arrow"))
        if not file.name.startswith(".") and not file.name.endswith(".plies.arrow")
    ]


def trained_on(paths: RunPaths) -> Counter[str]:
    """Rows that steps used, by producer."""
    used: Counter[str] = Counter()
    for file in paths.ledger.glob("step-*.arrow"):
        rows = pyarrow.ipc.open_file(file).read_all()
        used.update(str(shard).split("/")[0] for shard in rows["shard"].to_pylist())
    return used


def sides(paths: RunPaths) -> set[str]:
    """Processes that played, as the shards' own words have it."""
    told = (open_shard(file).schema.metadata or {} for file in shards(paths))
    return {metadata.get(b"side", b"").decode() for metadata in told}


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_cluster_of_two_processes_plays_a_run_and_one_of_them_may_die(workplace: Any):
    paths = RunPaths(workplace.folder / "runs" / "dask")
    words = ("train", "--config", "small.toml", "--run", "dask", "--steps", "6", "--json", "--pipeline.task-runner", "dask")
    with workplace.start(*words, *OVERLAPPED) as process:
        try:
            both = wait(600, "shards of both processes", lambda: len(sides(paths)) == 2 and sides(paths), process)
            kill(int(sorted(both)[0].rsplit("-", 1)[1]))
            out, err = process.communicate(timeout=400)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["steps"] == 6 and summary["orders_rejected"] == 0
    assert set(trained_on(paths)) == {"local"}, "nobody can tell where they were played"
    assert all(side.startswith("dask-") for side in sides(paths)) and len(sides(paths)) >= 2
