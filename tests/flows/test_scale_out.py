"""Rollouts elsewhere, tried for real: on a Dask cluster of two processes, and by producers on two Prefect workers with an
inference worker each; what is killed half-way costs time and nothing else.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
import yaml

from storage.control import read_control, read_producers
from storage.runs import RunPaths
from storage.shards import open_shard
from tests.waiting import free_port

ROOT = Path(__file__).resolve().parents[2]
OVERLAPPED = ("--pipeline.buffer-depth", "1", "--pipeline.no-deterministic", "--inference.engine", "torch")

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
    with workplace.start(*words, *OVERLAPPED, "--pipeline.groups-per-task", "1") as process:
        try:
            both = wait(300, "shards of both processes", lambda: len(sides(paths)) == 2 and sides(paths), process)
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
    assert read_control(paths).stop


class Hosts:
    """Two machines, as far as processes can tell: each a Prefect worker and an inference worker of its own port."""

    def __init__(self, workplace: Any, folder: Path) -> None:
        self._workplace, self._folder = workplace, folder
        self.processes: list[subprocess.Popen[Any]] = []

    def begin(self, name: str, words: list[str], cwd: Path, **environment: str) -> subprocess.Popen[Any]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "PYTHONWARNINGS"))}
        with open(self._folder / f"{name}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=cwd, stdout=log, stderr=log, env=kept | {"PYTHONPATH": str(ROOT)} | environment
            )
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def end(self) -> None:
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def hosts(workplace: Any, tmp_path: Path) -> Iterator[Hosts]:
    found = Hosts(workplace, tmp_path)
    try:
        yield found
    finally:
        found.end()


def test_producers_on_two_workers_play_for_a_run_and_one_host_may_die(workplace: Any, trained: Any, hosts: Hosts, tmp_path: Path):
    _, first, _ = trained
    runs = first.root.parent
    (model,) = (runs / "_models").glob("tiny-*")
    server = workplace._environment["PREFECT_API_URL"]
    api = {"PREFECT_API_URL": server, "PREFECT_HOME": str(tmp_path / "home"), "PREFECT_WORKER_QUERY_SECONDS": "2"}
    serving = {}
    for port in (free_port(), free_port()):
        words = ["-m", "cli.main", "serve", "--model", str(model), "--port", str(port), "--adapters-root", str(runs)]
        settings = ["--engine", "torch", "--max-model-length", "512", "--threads", "1"]
        serving[port] = hosts.begin(f"serve-{port}", [*words, *settings], tmp_path)
    told = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    told["deployments"] = [each for each in told["deployments"] if "produce_rollouts" in each["entrypoint"]]
    only = tmp_path / "prefect.yaml"
    only.write_text(yaml.safe_dump(told))
    for words in (["work-pool", "create", "producers", "--type", "process"], ["deploy", "--all", "--prefect-file", str(only)]):
        done = hosts.begin(words[0], ["-m", "prefect", "--no-prompt", *words], ROOT, **api)
        assert done.wait(timeout=120) == 0, hosts.log(words[0])
        hosts.processes.remove(done)
    for port in serving:
        words = ["-m", "prefect", "worker", "start", "--pool", "producers", "--limit", "1", "--name", f"host-{port}"]
        hosts.begin(f"worker-{port}", words, ROOT, ENTENTE_PRODUCER_URLS=f"http://127.0.0.1:{port}", **api)
    paths = RunPaths(runs / "scaled")
    words = ("train", "--config", "small.toml", "--run", "scaled", "--steps", "150", "--json")
    fleet = ("--pipeline.producers-min", "2", "--pipeline.producers-max", "2")
    with workplace.start(*words, *fleet, *OVERLAPPED) as process:
        try:

            def both() -> Any:
                statuses, _ = read_producers(paths)
                return len([status for status in statuses if status.published]) >= 2 and statuses

            statuses = wait(300, "start groups of both producers", both, process)
            killed = statuses[0]
            served_by = {open_shard(file)["worker"][0].as_py() for file in shards(paths) if killed.producer in file.parts}
            kill(killed.pid)
            port = next(port for port in serving if any(str(port) in name for name in served_by))
            kill(serving[port].pid)
            out, err = process.communicate(timeout=900)
        except AssertionError as error:
            process.kill()
            told = "\n".join(f"{file.name}: {file.read_text(errors='replace')[-1500:]}" for file in tmp_path.glob("*.log"))
            raise AssertionError(f"{error}\n{told}\n{process.communicate()[1]}") from error
        finally:
            process.kill()
    assert process.returncode == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["steps"] == 150 and summary["orders_rejected"] == 0 and summary["max_policy_lag_seen"] <= 2
    used = trained_on(paths)
    assert sum(name.startswith("fleet-") for name in used) >= 2, f"rows of two producers were trained on: {used}"
    wait(60, "the producer that is left to end", lambda: not any(status.at_work() for status in read_producers(paths)[0]))
    rows = pa.concat_tables([open_shard(file).select(["decision_id"]).replace_schema_metadata(None) for file in shards(paths)])
    assert len(set(rows["decision_id"].to_pylist())) == rows.num_rows, "no decision twice"


def test_dask_has_a_producer_in_each_worker_and_one_in_the_place_of_a_worker_that_dies(workplace: Any, trained: Any):
    from distributed import LocalCluster

    paths = RunPaths(workplace.folder / "runs" / "dasked")
    words = (
        "train",
        "--config",
        "small.toml",
        "--run",
        "dasked",
        "--steps",
        "30",
        "--json",
        "--pipeline.task-runner",
        "producers",
    )
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0) as cluster,
        workplace.start(*words, *OVERLAPPED) as training,
    ):
        try:
            wait(120, "the run", lambda: paths.control.exists() and not read_control(paths).stop, training)
            producing = workplace.start("produce", "--run", "dasked", "--dask", cluster.scheduler_address, "--json")
            with producing:

                def playing() -> Any:
                    statuses, _ = read_producers(paths)
                    return len([status for status in statuses if status.published]) >= 2 and statuses

                statuses = wait(300, "producers in both workers", playing, training, producing)
                kill(statuses[0].pid)
                wait(120, "a third producer", lambda: len(read_producers(paths)[0]) >= 3, training, producing)
                _out, err = training.communicate(timeout=600)
                ended, said = producing.communicate(timeout=60)
        finally:
            training.kill()
    assert training.returncode == 0, err
    assert producing.returncode == 0, said
    assert {each["why"] for each in json.loads(ended.splitlines()[-1])} == {"its training has ended"}
    used = trained_on(paths)
    assert "local" not in used and len(used) >= 2
