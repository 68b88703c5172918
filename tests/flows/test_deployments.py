"""prefect.yaml, tried as its first lines say: a server, a work pool, a worker, a run, and what the pages then show.

One real server of its own, one worker and one small training run for the whole file. What the pages draw is asked of the API.
"""

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from entente.prefect_server import environment
from entente.prefect_server.automations import SILENT_S, crash_silent_runs
from entente.settings.layers import layered_settings
from flows.recover_training import SILENT
from state_cache.settings import CacheSettings
from state_cache.store import open_cache, version_name
from tests.command import end_processes_of
from tests.prefect_api import asker
from tests.test_deploy import DEPLOYMENTS, PODS, TEMPLATE
from tests.waiting import free_port, wait_for

ROOT = Path(__file__).resolve().parents[2]
KEY = "entente:key-of-the-tests"
BY_COMMAND = environment._PREFECT | environment._PINNED
FINISHED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


class Prefect:
    """A server and a worker in processes of their own, started in the project's folder as prefect.yaml says."""

    def __init__(self, folder: Path, runs_root: Path, **environment: str) -> None:
        self.port = free_port()
        api = f"http://127.0.0.1:{self.port}/api"
        self.ask = asker(api, KEY)
        self.home = folder / "prefect-home"
        self._folder = folder
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "PYTHONWARNINGS"))}
        self.environment = kept | {
            "PREFECT_HOME": str(self.home),
            "PREFECT_API_URL": api,
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "DO_NOT_TRACK": "1",
            "ENTENTE_RUNS_ROOTS": str(runs_root),
            "PREFECT_SERVER_API_AUTH_STRING": KEY,
            "PREFECT_API_AUTH_STRING": KEY,
            "PYTHONPATH": str(ROOT),
            **environment,
        }

    def command(self, *words: str) -> None:
        """`prefect WORDS`, to its end."""
        line = [sys.executable, "-m", "prefect", *words]
        done = subprocess.run(line, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, f"prefect {' '.join(words)}: {done.stdout}{done.stderr}"

    def begin(self, *words: str) -> None:
        """`prefect WORDS`, which goes on until `end`."""
        line = [sys.executable, "-m", "prefect", *words]
        with open(self._folder / f"{words[0]}.log", "wb") as log:
            self._started.append((words[0], subprocess.Popen(line, cwd=ROOT, env=self.environment, stdout=log, stderr=log)))

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def check_alive(self) -> None:
        """Fail where a process of ours ended."""
        for name, process in self._started:
            assert process.poll() is None, f"prefect {name} ended:\n{self.log(name)[-3000:]}"

    def healthy(self) -> bool:
        try:
            return bool(self.ask("health", method="GET"))
        except httpx.HTTPError:
            return False

    def end(self) -> list[str]:
        """End what was begun, the last first; what nevertheless remains of it, by its command line."""
        for _, process in reversed(self._started):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return end_processes_of(self.home, end_by_themselves_s=60)  # they see their parent's end


def small_parameters(workplace: Any) -> dict[str, Any]:
    """Parameters of a run of two steps, whose model other tests share, and whose forks reach springs of its cache's years."""
    given = {"runs_root": workplace.folder / "runs", "cache": {"last_year": 1903}}
    settings = layered_settings("laptop", [workplace.folder / "small.toml"], given)
    return {"settings": settings.model_dump(mode="json")}


@pytest.fixture(scope="module")
def deployed(
    workplace: Any, tmp_path_factory: pytest.TempPathFactory, prefect_home: Any
) -> Iterator[tuple[Prefect, dict[str, Any]]]:
    """A server with the three deployments and one run of train-policy/train, which is done; the run as the API tells it."""
    prefect = Prefect(tmp_path_factory.mktemp("prefect"), workplace.folder / "runs")
    prefect_home(prefect.home)
    try:
        prefect.begin("server", "start", "--host", "127.0.0.1", "--port", str(prefect.port))
        wait_for("the server's start", 600, prefect.healthy, prefect.check_alive)
        prefect.command("work-pool", "create", "local", "--type", "process")
        prefect.command("--no-prompt", "deploy", "--all")
        prefect.begin("worker", "start", "--pool", "local")
        prefect.command("deployment", "run", "train-policy/train", "--params", json.dumps(small_parameters(workplace)))

        def finished() -> dict[str, Any] | None:
            (run,) = prefect.ask("flow_runs/filter", {"flow_runs": {"tags": {"all_": ["train"]}}})
            return run if run["state_type"] in FINISHED else None

        run = wait_for("the run", 600, finished, prefect.check_alive)
        assert run["state_type"] == "COMPLETED", f"{run['state']['message']}\n{prefect.log('worker')[-3000:]}"
        yield prefect, run
    finally:
        left = prefect.end()
    assert left == [], "processes that outlived the server and the worker"


@pytest.mark.system
def test_a_run_without_a_name_is_found_by_the_name_that_it_takes_and_its_tasks_are_drawn(deployed: Any, workplace: Any):
    prefect, run = deployed
    folder = run["name"].removeprefix("train-")
    assert (workplace.folder / "runs" / folder / "summary.json").is_file(), "the page's name leads to the run's folder"
    tasks = {"rollout-s1-g0", "train-step-1", "rollout-s2-g2", "train-step-2", "evaluate-base-vs-random"}

    def drawn() -> set[str]:
        return {node["label"] for _, node in prefect.ask(f"flow_runs/{run['id']}/graph-v2", method="GET")["nodes"]}

    # The server records task runs from events, some of them after the flow run has ended.
    wait_for("all tasks in the graph", 60, lambda: tasks <= drawn())


@pytest.mark.system
def test_the_run_s_page_leads_to_its_progress_its_steps_and_its_result(deployed: Any):
    prefect, run = deployed
    name = run["name"].removeprefix("train-")
    shown = {
        each["type"]: each for each in prefect.ask("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run["id"]]}}})
    }
    assert shown.keys() == {"progress", "table", "markdown"} and all(each["key"] for each in shown.values())
    assert shown["progress"]["data"] == 100 and shown["progress"]["description"]
    assert shown["table"]["description"].startswith(f"{name}: its steps, newest first")
    steps = json.loads(shown["table"]["data"])
    assert len(steps) == 2 and "tokens/s" in steps[0]
    assert shown["markdown"]["description"] and "The trained policy, version" in shown["markdown"]["data"]
    assert "teacher" in shown["markdown"]["data"] and name in shown["markdown"]["data"]


@pytest.mark.system
def test_the_nightly_refresh_stands_on_the_server_s_calendar(deployed: Any):
    """The server's scheduler works with the SQLAlchemy that is installed: with 2.1 it fails at every beat, in its log only."""
    prefect, _ = deployed
    coming = {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}, "flows": {"name": {"any_": ["build-state-cache"]}}}
    runs = wait_for("the calendar", 600, lambda: prefect.ask("flow_runs/filter", coming), prefect.check_alive)
    assert {run["expected_start_time"][11:16] for run in runs} == {"03:00"}
    assert {run["parameters"]["run"] for run in runs} == {"newest"}


def run_from_the_page(prefect: Prefect, deployment: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Start a deployment as its page does, again while its schedule's own run is ahead, as at 03:00; the flow run, completed."""
    made = prefect.ask(f"deployments/name/{deployment}", method="GET")

    def start() -> dict[str, Any]:
        return prefect.ask(f"deployments/{made['id']}/create_flow_run", {"parameters": parameters})

    run = start()

    def finished() -> dict[str, Any] | None:
        now = prefect.ask(f"flow_runs/{run['id']}", method="GET")
        if now["state_type"] == "CANCELLED" and "concurrency limit" in now["state"]["message"]:
            run.update(start())
            return None
        return now if now["state_type"] in FINISHED else None

    ended = wait_for(deployment, 600, finished, prefect.check_alive)
    assert ended["state_type"] == "COMPLETED", f"{ended['state']['message']}\n{prefect.log('worker')[-3000:]}"
    return ended


@pytest.mark.system
def test_a_run_started_from_the_page_takes_the_newest_refresh_and_both_pages_say_so(deployed: Any, workplace: Any):
    prefect, trained = deployed
    root, before = workplace.folder / "runs", trained["name"].removeprefix("train-")
    run_from_the_page(prefect, "build-state-cache/build-cache", {"runs_root": str(root), "run": before})
    parameters = small_parameters(workplace)
    cache = parameters["settings"]["cache"]
    cache["from_run"], parameters["settings"]["telemetry"]["report"] = "newest", True
    run = run_from_the_page(prefect, "train-policy/train", parameters)
    name = run["name"].removeprefix("train-")
    stored = CacheSettings.model_validate(json.loads((root / name / "settings.json").read_text())["cache"])
    assert stored.from_run == before and stored.scripted == CacheSettings.model_validate(cache).scripted
    plain, refreshed = (open_cache(root / "_state_cache" / version_name(each)) for each in (stored.scripted, stored))
    assert refreshed.held_out == plain.held_out and refreshed.train != plain.train
    artifacts = prefect.ask("artifacts/latest/filter", {"artifacts": {"type": {"any_": ["markdown"]}}})
    texts = {each["key"]: each["data"] for each in artifacts}
    assert f"Runs that started from it: {name}." in texts[f"refresh-{version_name(stored)}"]
    reached = f"run {before} reached them"
    assert reached in texts[f"result-{name}"] and reached in (root / name / "report.html").read_text()


@pytest.mark.system
def test_the_setup_job_makes_pool_deployments_and_automations(deployed: Any):
    """As deploy/kubernetes has it. It is the last here: its deployments take the place of those of one machine."""
    prefect, _ = deployed
    (setup,) = PODS["Job/setup"]["containers"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    words, variables = [*setup["command"], *setup["args"]], prefect.environment | {"PATH": path}
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    (pool,) = (each for each in prefect.ask("work_pools/filter", {}) if each["name"] == "kubernetes")
    assert pool["type"] == "kubernetes" and pool["base_job_template"] == TEMPLATE
    found = {each["name"]: each for each in prefect.ask("deployments/filter", {}) if each["work_pool_name"] == "kubernetes"}
    assert {name: each["job_variables"] for name, each in found.items()} == {
        name: each["work_pool"]["job_variables"] for name, each in DEPLOYMENTS.items()
    }
    assert sum(each["name"].startswith("Entente: ") for each in prefect.ask("automations/filter", {})) == 4
    # A field that the template lacks is refused when the run is created, not by Kubernetes.
    with pytest.raises(httpx.HTTPStatusError) as refused:
        prefect.ask(f"deployments/{found['train']['id']}/create_flow_run", {"job_variables": {"cpu": 4}})
    assert refused.value.response.status_code == 422 and "cpu" in refused.value.response.text


def as_variables(table: dict[str, Any], prefix: str = "PREFECT") -> dict[str, str]:
    """A table of prefect.toml as the environment variables that mean the same."""
    found: dict[str, str] = {}
    for name, value in table.items():
        variable = f"{prefix}_{name.upper()}"
        found |= as_variables(value, variable) if isinstance(value, dict) else {variable: str(value).lower()}
    return found


def test_a_server_started_by_hand_behaves_as_the_one_that_a_command_brings_along(monkeypatch: pytest.MonkeyPatch):
    from prefect.settings import Settings

    by_hand = as_variables(tomllib.loads((ROOT / "prefect.toml").read_text()))
    assert by_hand.pop("PREFECT_SERVER_UI_STATIC_DIRECTORY") == ".prefect/ui"  # by command it is in PREFECT_HOME
    ours = ("PREFECT_SERVER_", "PREFECT_FLOWS_", "PREFECT_CLIENT_")
    by_command = {name: value for name, value in BY_COMMAND.items() if name.startswith(ours)}
    only_there = {name for name in by_command if "EPHEMERAL" in name or "LOGGING" in name}
    only_there |= environment._PINNED.keys() - by_hand.keys()  # Prefect's own defaults
    assert set(by_hand) == set(by_command) - only_there
    told = []
    for variables in (by_hand, by_command):
        with monkeypatch.context() as bare:
            for name in (name for name in os.environ if name.startswith("PREFECT_")):
                bare.delenv(name)
            for name in by_hand:
                bare.setenv(name, variables[name].upper() if name.endswith("PERIOD") else variables[name])
            bare.chdir("/")
            told.append(Settings())
    assert told[0].server == told[1].server and told[0].flows == told[1].flows and told[0].client == told[1].client
    assert told[0].server.services.task_run_recorder.batch_size == 200 and not told[0].server.ui.v2_enabled
    assert told[0].flows.heartbeat_frequency == 30 and told[0].client.max_retries == 5
    assert told[0].client.retry_extra_codes == {500}


def test_a_worker_s_runs_beat_and_wait_as_those_of_a_command_do():
    """A worker starts a run in its pool's environment, wherever that worker itself was started."""
    by_deployment = yaml.safe_load((ROOT / "prefect.yaml").read_text())["definitions"]["local_pool"]["job_variables"]["env"]
    same = {name: value for name, value in by_deployment.items() if name in BY_COMMAND}
    assert len(same) == 5 and same.items() <= BY_COMMAND.items()


def test_a_run_counts_as_crashed_only_after_several_signs_of_life_failed_to_come():
    beat = int(BY_COMMAND["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
    assert 3 * beat <= SILENT_S
    (action,) = crash_silent_runs()["actions"]
    assert action["message"].startswith(SILENT), "recovery tells such a crash from others by these words"
