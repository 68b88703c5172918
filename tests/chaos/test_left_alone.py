"""A training run left alone: its flow, its trainer and its whole host are killed, and it goes on by itself.

Everything is real and its own: `entente up` in a folder outside of the project, and a run started through the deployment without
a name. The only help from outside is what a host gives its services: a worker that was killed is begun again (`entente up`).
"""

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from storage.runs import RunPaths
from tests.chaos.audit_run import audit
from tests.command import Entente, end_processes_of, runs
from tests.prefect_api import asker
from tests.waiting import free_port, kill, wait_for

ROOT = Path(__file__).resolve().parents[2]
GOES_ON_WITHIN_S = 900.0
"""Seconds that a run may take after a kill until it records further steps."""
STEPS = 48
SMALL: dict[str, Any] = {
    "run": "",
    "steps": STEPS,
    "tiny_model": {"hidden": 64, "layers": 2, "source_games": 6, "imitation_steps": 12, "imitation_positions": 2},
    "inference": {"engine": "torch", "threads": 1, "max_sequences": 32},
    "cache": {"train_snapshots": 24, "held_out_snapshots": 6},
    "rollouts": {"start_groups": 4, "forks_per_group": 4},
    "training": {"threads": 1},
    "evaluation": {"positions": 2},
    "telemetry": {"wandb": "disabled", "report": False},
}
"""Over the deployment's own parameters: the laptop run, made light enough to be left alone beside other work."""


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    return {**base, **{name: merged(base.get(name, {}), new) if isinstance(new, Mapping) else new for name, new in over.items()}}


class Servers:
    """A folder with a Prefect server and a worker of its own."""

    def __init__(self, folder: Path) -> None:
        self._home, self.runs = folder / ".prefect", folder / "runs"
        for name in ("prefect.yaml", "prefect.toml"):
            shutil.copy(ROOT / name, folder)
        (folder / "flows").symlink_to(ROOT / "flows")
        self._port = free_port()
        self._entente = Entente(folder, PREFECT_WORKER_QUERY_SECONDS="3", PREFECT_HOME=str(self._home))

    def up(self) -> None:
        """Begin what is not there of server, pool, deployments, automations and worker; again where the machine was too busy."""
        for _ in range(8):
            done = self._entente.process("up", "--port", str(self._port), timeout=1800)
            if "try again" not in done.stderr:
                break
        assert done.returncode == 0, done.stderr

    def down(self) -> list[str]:
        """End all of it; command lines of what was still there afterwards, and was killed."""
        self._entente("down")
        return end_processes_of(self._home)

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """What the server answers; a busy one is asked again."""
        ask = asker(f"http://127.0.0.1:{self._port}/api", (self._home / "key").read_text().strip())

        def answer() -> list[Any]:
            with suppress(httpx.HTTPError):
                return [ask(path, body)]
            return []

        return wait_for("the server's answer", 120, answer)[0]

    def worker(self) -> int:
        """Process id of the worker."""
        record = json.loads((self._home / "up.json").read_text())
        return next(each["pid"] for each in record if each["what"] == "worker")

    def records(self) -> list[dict[str, Any]]:
        """The records of processes that trained, the newest last."""
        found = (json.loads(file.read_text()) for file in (self.runs / "_flow_runs").glob("[0-9a-f]*.json"))
        return sorted(found, key=lambda record: int(record["began"].split()[-1]))

    def train(self) -> RunPaths:
        """Start train-policy/train; the run's folder."""
        deployments = self.ask("deployments/filter", {"deployments": {"tags": {"all_": ["train"]}}})
        (deployment,) = (each for each in deployments if each["entrypoint"].endswith(":train_policy"))
        parameters = merged(deployment["parameters"], {"settings": SMALL})
        self.ask(f"deployments/{deployment['id']}/create_flow_run", {"parameters": parameters, "state": {"type": "SCHEDULED"}})
        return RunPaths(self.runs / wait_for("the run's beginning", 600, self.records)[-1]["run"])

    def kill(self, what: str) -> None:
        """Kill the flow's process, its trainer, or with "host" these and the worker, which begins again after a while."""
        flow = psutil.Process(self.records()[-1]["pid"])
        if what == "trainer":
            kill(next(child for child in flow.children() if runs(child, "entente.training.process")).pid)
        elif what == "flow":
            kill(flow.pid)
        else:
            for pid in (self.worker(), flow.pid, *(child.pid for child in flow.children(recursive=True))):
                kill(pid)
            time.sleep(10)
            self.up()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path)
    try:
        servers.up()
        yield servers
    finally:
        left = servers.down()
    assert left == []


def recorded(paths: RunPaths) -> int:
    """Number of steps that have a ledger."""
    return len(list(paths.ledger.glob("step-*.arrow")))


@pytest.mark.slow
def test_a_run_whose_processes_are_killed_goes_on_by_itself_and_ends_complete(servers: Servers):
    paths = servers.train()
    for number, what in enumerate(("flow", "trainer", "host"), start=1):
        wait_for(f"step {number * STEPS // 4}", 900, lambda due=number * STEPS // 4: recorded(paths) >= due)
        at = recorded(paths)
        servers.kill(what)
        wait_for(f"the run after '{what}'", GOES_ON_WITHIN_S, lambda least=at + 3: recorded(paths) >= least)
        assert len(servers.records()) == number + 1, "a process of its own goes on"
    wait_for("the run's end", 900, paths.summary.is_file)
    audit(paths, STEPS, max_lag=json.loads(paths.settings.read_text())["storage"]["max_policy_lag"])

    mine = {"id": {"any_": [record["flow_run"] for record in servers.records()]}}
    done, going = ({"state": {"type": {"any_": states}}} for states in (["COMPLETED"], ["RUNNING", "PENDING"]))
    wait_for("the flow run's end", 120, lambda: len(servers.ask("flow_runs/filter", {"flow_runs": mine | done})) == 1)
    time.sleep(20)  # the server writes down what tasks tell some seconds later
    assert servers.ask("task_runs/filter", {"flow_runs": mine, "task_runs": going}) == []
    assert servers.ask("flow_runs/filter", {"flow_runs": mine | going}) == []
