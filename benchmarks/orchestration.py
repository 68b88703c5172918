"""`orchestration`: the cost of Prefect and the flow: of a task, of its server, the delay of the page, and the share of a step.

Empty tasks have the form of a run's tasks. They run on a real server with its own database. Steps are those of real `entente
train` processes. Prefect's share of a laptop step is in CPU seconds: all of the server's, from a short and a long run on it, and
those of the client for an empty task, times the tasks of a step. The client's heartbeats and its updates of the page are not in
it. Steps of a minute, and steps of a trainer that always finds rows, use simulated rollouts: start groups of the laptop run,
published again at a set rate. This module starts Prefect only as a process.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import psutil

from benchmarks.entente_run import RunFigures, run_entente, tree_cpu_s
from benchmarks.outcome import Outcome, Target
from telemetry.errors import DataError
from telemetry.progress import reporter

TARGETS = {
    "ms_per_task_threads": Target(at_most=12.0),
    "server_cpu_ms_per_task": Target(at_most=9.0),
    "orchestration_cpu_share": Target(at_most=0.05),
    "orchestration_share_60s": Target(at_most=0.005),
    "ui_lag_s": Target(at_most=3.0),
    "trainer_idle_share_spare_capacity": Target(at_most=0.05),
}
IN_FLIGHT = 24
"""Tasks at a time: those of a step and of two steps ahead."""
START_GROUPS = 8
"""Start groups of a step in the laptop preset."""
_SHORT_STEPS = 2
"""Steps of the shorter laptop run, whose cost is subtracted from that of the longer one."""
_SPARE = 4
"""Rate of rollouts with spare capacity, over the rate of the trainer."""
_SETTLES_WITHIN_S = 120.0
_QUIET_S = 1.5
"""Seconds without work after which the server counts as idle."""
_LIGHT = ("--evaluation.positions", "4", "--evaluation.powers-per-position", "1", "--evaluation.bootstrap", "100")
"""Settings for short evaluations, which are not part of a step."""
_UNLEARNED = ("--training.learning-rate", "1e-12")
"""Keeps the policy at the base model, whose rows are replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """A finished run on the benchmark's own server."""

    figures: RunFigures
    server_cpu_s: float
    """CPU seconds of the server until it was idle again."""
    tasks: int
    """Tasks that the run completed."""


def bench_orchestration(*, tasks: int, rounds: int, steps: int, slow_steps: int, slow_step_s: float) -> Outcome:
    """Measure. An arm with 0 tasks or steps is left out, with its figures. Prefect's share of a step needs both.

    Args:
        tasks: empty tasks of a round.
        steps: steps of the laptop run and of the run with spare capacity; the first one is not counted.
        slow_steps: steps of about `slow_step_s` seconds.
    """
    metrics: dict[str, float] = {}
    with TemporaryDirectory(prefix="entente-bench-") as scratch:
        folder = Path(scratch)
        with prefect_server(folder) as server:
            if tasks and rounds:
                metrics |= measure_tasks(*server, tasks, rounds)
            laptop = None
            if steps:
                served_run(folder, *server, "first", 1)  # makes model and positions, which the others find
                laptop = served_run(folder, *server, "laptop", steps)
            if laptop is not None and tasks and rounds and steps > _SHORT_STEPS:
                short = served_run(folder, *server, "short", _SHORT_STEPS)
                metrics |= share_figures(short, laptop, client_ms=metrics["client_cpu_ms_per_task"])
        if laptop is not None:
            metrics["laptop_step_s"] = median(laptop.figures.settled("time/step_s"))
            train_s = median(laptop.figures.settled("time/train_s"))
            metrics |= measure_simulated(folder, train_s, steps, slow_steps, slow_step_s)
    return Outcome(
        benchmark="orchestration",
        metrics=metrics,
        targets={name: target for name, target in TARGETS.items() if name in metrics},
        scaled_down=("ui_lag_s",) if tasks < 400 else (),  # the page's delay grows with the number of tasks
    )


def served_run(folder: Path, address: str, server: psutil.Process, run: str, steps: int) -> ServedRun:
    """Train a run of the laptop preset in `folder`, on the server at `address`."""
    reporter().say(f"{steps} steps of the laptop preset")
    cpu_s, tasks = settled_cpu_s(server), completed(address)
    with patch.dict(os.environ, {"PREFECT_API_URL": address}):
        figures = run_entente(["--telemetry.no-report", "--steps", str(steps), *_LIGHT], folder / "runs", run)
    return ServedRun(figures=figures, server_cpu_s=settled_cpu_s(server) - cpu_s, tasks=completed(address) - tasks)


def share_figures(short: ServedRun, long: ServedRun, *, client_ms: float) -> dict[str, float]:
    """Prefect's CPU time in a step, and its share of the CPU time of all processes.

    The two runs differ only in their number of steps, so the difference of a count is that of the further steps.

    Args:
        client_ms: CPU milliseconds of the client for a task.
    """
    steps = len(long.figures.steps) - len(short.figures.steps)
    tasks, server_s = (long.tasks - short.tasks) / steps, (long.server_cpu_s - short.server_cpu_s) / steps
    client_s = 1e-3 * client_ms * tasks
    return {
        "orchestration_cpu_share": (client_s + server_s) / (long.figures.cpu_a_step + server_s),
        "prefect_tasks_per_step": tasks,
        "prefect_client_cpu_ms_per_step": 1e3 * client_s,
        "prefect_server_cpu_ms_per_step": 1e3 * server_s,
    }


def measure_simulated(folder: Path, train_s: float, steps: int, slow_steps: int, slow_step_s: float) -> dict[str, float]:
    """Steps of a run with fast simulated rollouts, and of one with slow ones.

    Args:
        train_s: seconds of the trainer for a step.
    """
    rate = _SPARE * START_GROUPS / train_s
    reporter().say(f"steps with two more ahead, {rate:.0f} simulated start groups a second")
    found = idle_figures(train(folder, "spare", "--steps", str(steps), *simulated(rate, depth=2)))
    if not slow_steps:
        return found
    rate = START_GROUPS / max(1.0, slow_step_s - train_s)
    reporter().say(f"{slow_steps} steps of {slow_step_s:.0f} s, with simulated rollouts")
    slow = train(folder, "slow", "--steps", str(slow_steps + 1), *simulated(rate, depth=0))
    return found | {
        "orchestration_share_60s": median(step["time/orchestration_share"] for step in slow[1:]),
        "slow_step_s": median(step["time/step_s"] for step in slow[1:]),
    }


def simulated(rate: float, *, depth: int) -> tuple[str, ...]:
    """Flags of a run that replays the rollouts of the run `laptop`."""
    ways = ("--pipeline.no-deterministic",) if depth else ()
    return (
        *("--simulated.from-run", "laptop", "--simulated.rate", str(rate), "--pipeline.buffer-depth", str(depth)),
        *(*ways, *_UNLEARNED, *_LIGHT),
    )


def idle_figures(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The wait of a trainer that always finds rows, without the first steps, which have no rollouts ahead."""
    later = steps[3:] or steps[1:]
    return {
        "trainer_idle_share_spare_capacity": median(step["time/trainer_wait_s"] / step["time/step_s"] for step in later),
        "spare_step_s": median(step["time/step_s"] for step in later),
    }


def train(folder: Path, run: str, *flags: str) -> list[dict[str, float]]:
    """Train a run in `folder` with its own Prefect database; returns the figures of its steps."""
    return run_entente(["--telemetry.no-report", *flags], folder / "runs", run, alone_in=folder).steps


def measure_tasks(address: str, server: psutil.Process, tasks: int, rounds: int) -> dict[str, float]:
    """The cost of an empty task for client and server, and the delay until the server shows all as completed."""
    found: list[dict[str, float]] = []
    settled_cpu_s(server)
    # The first round creates the tables of the database and is not counted.
    for number in range(rounds + 1):
        reporter().stage("rounds of empty tasks", number, rounds + 1)
        found.append(_round(address, server, 32 if number == 0 else tasks))
    reporter().stage("rounds of empty tasks", rounds + 1, rounds + 1)
    reporter().say("empty tasks on a Dask cluster of two processes")
    dask = run_empty_tasks(address, max(8, tasks // 4), "dask")
    medians = {name: median(each[name] for each in found[1:]) for name in found[0]}
    dask_ms = 1000 * dask["seconds"] / dask["tasks"]
    return medians | {
        "ms_per_task_dask": dask_ms,
        # With Dask a task has one start group. A producer's task has half of a step's, and costs as much as one of this process.
        "ms_per_start_group_dask": dask_ms,
        "ms_per_step_dask": dask_ms * START_GROUPS,
        "ms_per_start_group_producers": medians["ms_per_task_threads"] / (START_GROUPS / 2),
    }


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


def run_empty_tasks(address: str, tasks: int, runner: str = "threads") -> dict[str, Any]:
    """Run the flow of empty tasks in its own process, on its event loop or a Dask cluster; returns its figures."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks.empty_tasks", str(tasks), str(IN_FLIGHT), runner],
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


def completed(address: str, flow_run: str | None = None) -> int:
    """Number of task runs that the server reports as completed; of `flow_run` only, if given."""
    wanted: dict[str, object] = {"task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    if flow_run is not None:
        wanted["flow_runs"] = {"id": {"any_": [flow_run]}}
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
