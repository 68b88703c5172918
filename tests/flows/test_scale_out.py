"""A run on a Dask cluster outlives a killed worker; when the scheduler is killed it ends with a sentence and can be resumed."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.ipc
import pytest

from entente.inference.server_process import free_port
from storage.runs import RunPaths
from storage.shards import open_shard
from tests.shard_rows import shard_files

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = "import tasks.dask_rollouts as dask; dask.SCHEDULER_BACK_S = 2; from entente.cli.main import main; main()"
"""The command, which waits less for a scheduler that is lost."""


def wait(seconds: float, what: str, done: Callable[[], Any], *alive: subprocess.Popen[Any]) -> Any:
    """The first true answer of `done`, while these processes live."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for process in alive:
            assert process.poll() is None, f"while waiting for {what}, {process.args} ended: {process.communicate()}"
        if answer := done():
            return answer
        time.sleep(0.2)
    raise AssertionError(f"{what} took more than {seconds} s")


def sides(paths: RunPaths) -> set[str]:
    """Processes that played, by the metadata of the shards."""
    metadata = (open_shard(file).schema.metadata or {} for file in shard_files(paths))
    return {each.get(b"side", b"").decode() for each in metadata}


def is_open(address: str) -> bool:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
        return True
    return False


def steps_begun(paths: RunPaths) -> int:
    return len(list(paths.ledger.glob("step-*.arrow")))


@pytest.fixture
def dask() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a part of a cluster that somebody else runs: `dask("scheduler", ...)`."""
    started: list[subprocess.Popen[str]] = []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(part: str, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", f"distributed.cli.dask_{part}", *words, "--no-dashboard"]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(timeout=30)


@pytest.mark.in_turn
@pytest.mark.system
def test_a_worker_and_the_scheduler_are_killed_and_no_row_is_lost_or_doubled(workplace: Any, dask: Any):
    address = f"tcp://127.0.0.1:{free_port()}"
    paths = RunPaths(workplace.folder / "runs" / "dask")
    scheduler = dask("scheduler", "--host", "127.0.0.1", "--port", address.rpartition(":")[2])
    workers = [dask("worker", address, "--no-nanny", "--nthreads", "4") for _ in range(2)]
    words = ("train", "--config", "small.toml", "--run", "dask", "--json", "--evaluation.positions", "1")
    on_dask = ("--pipeline.task-runner", "dask", "--pipeline.dask-address", address, "--steps", "99")
    wait(60, "the scheduler", lambda: is_open(address))
    with workplace.start(*words, *on_dask, program=PATIENCE) as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        wait(300, "shards of both workers", lambda: len(sides(paths)) == 2, process)
        workers[0].kill()
        after = steps_begun(paths) + 2
        wait(200, "two steps after the kill of a worker", lambda: steps_begun(paths) >= after, process)
        scheduler.kill()
        _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert err.splitlines()[-1].endswith(f"the Dask scheduler at '{address}' is lost: restart it, and resume the run"), err
    assert sides(paths) <= {f"dask-{os.uname().nodename}-{worker.pid}" for worker in workers}

    steps = steps_begun(paths) + 1
    here = ("--pipeline.task-runner", "threads", "--pipeline.dask-address", "", "--steps", str(steps))
    done = workplace.process(*words, "--resume", *here)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["steps"] == steps and summary["orders_rejected"] == 0
    ledgers = [pyarrow.ipc.open_file(file).read_all() for file in paths.ledger.glob("step-*.arrow")]
    assert len(ledgers) == steps
    for tables in (map(open_shard, shard_files(paths)), ledgers):
        names = [name for table in tables for name in table["decision_id"].to_pylist()]
        assert len(set(names)) == len(names) > 0
