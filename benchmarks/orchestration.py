"""`orchestration`: the cost of a Prefect task for client and server, and the delay of the page.

Empty tasks have the form of a run's tasks, on a real server with its own database. The client's heartbeats and its updates of the
page are not in it. This module starts Prefect only as a process. `bench e2e` has the share of orchestration in a step.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.entente_run import tree_cpu_s
from benchmarks.outcome import Outcome, Target
from telemetry.errors import DataError, InputError
from telemetry.progress import reporter

TARGETS = {
    "ms_per_task_threads": Target(at_most=12.0),
    "server_cpu_ms_per_task": Target(at_most=9.0),
    "ui_lag_s": Target(at_most=3.0),
}
IN_FLIGHT = 24
"""Tasks at a time: those of a step and of two steps ahead."""
_SETTLES_WITHIN_S = 120.0
_QUIET_S = 1.5
"""Seconds without work after which the server counts as idle."""


def bench_orchestration(*, tasks: int, rounds: int) -> Outcome:
    """Measure `rounds` rounds of `tasks` empty tasks.

    Raises:
        InputError: there is nothing to measure.
    """
    if tasks < 1 or rounds < 1:
        raise InputError(f"{tasks} tasks and {rounds} rounds measure nothing: at least 1 and 1.")
    with TemporaryDirectory(prefix="entente-bench-") as scratch, prefect_server(Path(scratch)) as server:
        return Outcome(benchmark="orchestration", metrics=measure_tasks(*server, tasks, rounds), targets=TARGETS)


def measure_tasks(address: str, server: psutil.Process, tasks: int, rounds: int) -> dict[str, float]:
    """The cost of an empty task for client and server, and the delay until the server shows all as completed."""
    found: list[dict[str, float]] = []
    settled_cpu_s(server)
    # The first round creates the tables of the database and is not counted.
    for number in range(rounds + 1):
        reporter().stage("rounds of empty tasks", number, rounds + 1)
        found.append(_round(address, server, 32 if number == 0 else tasks))
    reporter().stage("rounds of empty tasks", rounds + 1, rounds + 1)
    return {name: median(each[name] for each in found[1:]) for name in found[0]}


def _round(address: str, server: psutil.Process, tasks: int) -> dict[str, float]:
    idle_s = 2.0
    before = tree_cpu_s(server.pid)
    time.sleep(idle_s)
    idle = (tree_cpu_s(server.pid) - before) / idle_s
    before, began = tree_cpu_s(server.pid), time.monotonic()
    client = run_empty_tasks(address, tasks)
    ended = time.time()
    while completed(address, client["flow_run"]) < client["all_tasks"]:
        if time.time() - ended > _SETTLES_WITHIN_S:
            raise DataError(
                f"the server shows {completed(address, client['flow_run'])} of {client['all_tasks']} tasks as completed"
            )
        time.sleep(0.2)
    shown = time.time()
    after = settled_cpu_s(server)
    spent = after - before - idle * (time.monotonic() - began)
    return {
        "ms_per_task_threads": 1000 * client["seconds"] / client["tasks"],
        "client_cpu_ms_per_task": 1000 * client["cpu_s"] / client["tasks"],
        "server_cpu_ms_per_task": 1000 * spent / client["all_tasks"],
        "ui_lag_s": shown - ended,
    }


def run_empty_tasks(address: str, tasks: int) -> dict[str, Any]:
    """Run the flow of empty tasks in its own process; returns its figures."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks.empty_tasks", str(tasks), str(IN_FLIGHT)],
        env=os.environ | {"PREFECT_API_URL": address, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise DataError(f"empty tasks failed: {(done.stderr.strip().splitlines() or ['no error was printed'])[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


@contextmanager
def prefect_server(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A Prefect server with a new database under `folder`: its address and its process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    home = folder / "server"
    home.mkdir()
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=home, env=os.environ | {"PREFECT_HOME": str(home)}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    address = f"http://127.0.0.1:{port}/api"
    try:
        _wait_until_up(process, address, home / "server.log")
        yield address, psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_up(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    until = time.monotonic() + _SETTLES_WITHIN_S
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):
                return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > until:
                last = (log.read_text(errors="replace").strip().splitlines() or ["no error was printed"])[-1]
                raise DataError(f"the Prefect server of the benchmark did not start: {last}") from error
            time.sleep(0.2)


def completed(address: str, flow_run: str) -> int:
    """Number of task runs of the flow run that the server reports as completed."""
    wanted = {"task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}, "flow_runs": {"id": {"any_": [flow_run]}}}
    request = urllib.request.Request(
        f"{address}/task_runs/count", data=json.dumps(wanted).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(answer.read())


def settled_cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process once it is almost idle; waits at most _SETTLES_WITHIN_S."""
    until, last = time.monotonic() + _SETTLES_WITHIN_S, tree_cpu_s(process.pid)
    while time.monotonic() < until:
        time.sleep(_QUIET_S)
        now = tree_cpu_s(process.pid)
        if now - last < 0.06 * _QUIET_S:
            return now
        last = now
    return last
