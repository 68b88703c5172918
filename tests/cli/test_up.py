"""`entente up` and `entente down`, for real: a server, a pool, deployments and a worker, begun once and ended whole."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from uuid import UUID

import httpx
import psutil
import pytest
import yaml

from entente.cli import up
from entente.prefect_server import automations
from entente.prefect_server.automations import WHOLE_MACHINE, server_client
from entente.telemetry.errors import InputError
from storage.files import file_lock
from tests.command import Entente
from tests.http_here import Quiet, answering
from tests.players.endpoint_server import EndpointServer, a_page
from tests.prefect_api import asker
from tests.waiting import free_port, wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the project's deployments, whose processes end with the test."""
    for name in ("prefect.yaml", "prefect.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "flows").symlink_to(ROOT / "flows")
    yield tmp_path
    Entente(tmp_path)("down")


def entente(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which what it begins outlives."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.run(
        [sys.executable, "-m", "entente.cli.main", *words],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(ROOT), "PREFECT_WORKER_QUERY_SECONDS": "2"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def begun(folder: Path) -> list[psutil.Process]:
    return [psutil.Process(each["pid"]) for each in json.loads((folder / ".prefect" / "up.json").read_text())]


SCHEDULES = {"build_state_cache": [True], "recover_training": [True]}
"""Whether each schedule is on: the nightly refresh, and the look over all runs."""


def schedules(deployments: dict[str, Any]) -> dict[str, list[bool]]:
    return {flow: on for flow, each in deployments.items() if (on := [plan["active"] for plan in each["schedules"]])}


@pytest.mark.system
def test_up_starts_what_the_ui_needs_again_is_harmless_and_down_ends_it_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, prefect_home: Callable[[Path], Path]
):
    prefect_home(folder / ".prefect")
    port = str(free_port())
    first = entente(folder, "up", "--port", port)
    assert first.returncode == 0, first.stderr
    assert "server          started" in first.stdout and "worker          started" in first.stdout
    server, worker = begun(folder)
    api, key = f"http://127.0.0.1:{port}/api", (folder / ".prefect" / "key").read_text().strip()
    assert (
        f"http://127.0.0.1:{port}/dashboard" in first.stdout
        and f": {key}\n" in first.stdout
        and first.stdout.count("work pool       local") == 1
    )
    assert (folder / ".prefect" / "key").stat().st_mode & 0o777 == 0o600
    assert httpx.post(f"{api}/deployments/filter", json={}).status_code == 401, "without the key nobody gets an answer"
    preflight = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    asked = httpx.options(f"{api}/deployments/filter", headers=preflight)
    assert "access-control-allow-origin" not in asked.headers, "no other page may ask"
    ask = asker(api, key)
    found = {each["entrypoint"].split(":")[1]: each for each in ask("deployments/filter", {})}
    assert {each["work_pool_name"] for each in found.values()} == {"local"}
    deployed = yaml.safe_load((folder / "prefect.yaml").read_text())["deployments"]
    assert len(found) == len(deployed) and all(f"/{each['name']}" in first.stdout for each in found.values())
    assert "prefect deployment run train-policy/train\n" in first.stdout, "the first thing to try"
    assert schedules(found) == SCHEDULES

    made = {each["name"]: each for each in ask("automations/filter", {}) if each["name"].startswith("Entente: ")}
    assert len(made) == 4
    (queue,) = (each for each in ask("work_pools/local/queues/filter", {}) if each["name"] == WHOLE_MACHINE)
    assert queue["concurrency_limit"] == 1
    switched_off, altered = sorted(made)[:2]
    ask(f"automations/{made[switched_off]['id']}", {"enabled": False}, "PATCH")
    core = {part: made[altered][part] for part in ("name", "enabled", "trigger", "actions")}
    ask(f"automations/{made[altered]['id']}", core | {"description": "somebody's"}, "PUT")

    worker.kill()
    worker.wait(10)
    second = entente(folder, "up", "--port", port)
    assert "server          answers" in second.stdout and "work pool       local is there" in second.stdout
    assert "worker          started" in second.stdout, "what died is begun again"
    now = {each["entrypoint"].split(":")[1]: each for each in ask("deployments/filter", {})}
    assert {flow: each["id"] for flow, each in now.items()} == {flow: each["id"] for flow, each in found.items()}
    assert schedules(now) == SCHEDULES
    same, other = begun(folder)
    assert same == server and other != worker
    again = {each["name"]: each for each in ask("automations/filter", {}) if each["name"] in made}
    assert {name: each["id"] for name, each in again.items()} == {name: each["id"] for name, each in made.items()}
    assert not again[switched_off]["enabled"], "what somebody switched off stays off"
    assert again[altered]["description"] == made[altered]["description"], "what differs is brought up to date"

    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        ended = Entente(folder)("down")
        lines = [line for line in ended.stdout.splitlines() if not line.startswith("run ")]  # a check of lost runs may be due
        assert lines[0].startswith("worker") and "server          ended" in ended.stdout
        assert not server.is_running() and not other.is_running() and bystander.poll() is None
        assert "nothing that `entente up` started here" in Entente(folder)("down").stdout
    finally:
        bystander.kill()
        bystander.wait()


def test_a_number_that_another_process_bears_by_now_is_left_alone(folder: Path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        (folder / ".prefect").mkdir()
        record = [{"what": "server", "pid": bystander.pid, "started": 12345.0}]
        (folder / ".prefect" / "up.json").write_text(json.dumps(record))
        assert "nothing that `entente up` started here" in Entente(folder)("down").stdout
        assert bystander.poll() is None
        kept = json.loads((folder / ".prefect" / "up.json").read_text())
        assert kept == record, "it may be of another machine with this folder, whose `down` needs it"
    finally:
        bystander.kill()
        bystander.wait()


def test_what_another_machine_with_this_folder_started_stays_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    theirs = up.Started("worker", 1, "its boot 5", "http://127.0.0.1:9/api", "local", "another")
    (tmp_path / "up.json").write_text(json.dumps([asdict(theirs)]))
    ours = up._start("worker", ["-c", "import time; time.sleep(60)"], tmp_path / "worker.log", {}, pool="local")
    assert [each.pid for each in up._started()] == [1, ours.pid]
    up.down()
    ours.wait(5)
    assert up._started() == [theirs], "its own `down` needs it"


def test_no_server_starts_on_the_database_of_one_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def starts() -> None:
        raise RuntimeError

    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    port = free_port()
    monkeypatch.setattr(up, "want_key", starts)
    theirs = up.Started("server", 1, "its boot 5", f"http://127.0.0.1:{port}/api", host="another")
    (tmp_path / "up.json").write_text(json.dumps([asdict(theirs)]))
    with pytest.raises(InputError, match=r"on 'another' started a server with this PREFECT_HOME, .*: run `entente down` there"):
        up._server(f"http://127.0.0.1:{port}", port)
    (tmp_path / "up.json").write_text(json.dumps([asdict(replace(theirs, host=socket.gethostname()))]))
    with pytest.raises(RuntimeError):  # a server of this machine that has ended gets a successor
        up._server(f"http://127.0.0.1:{port}", port)


WORKER = """
import os, signal, subprocess, sys
started = {"PREFECT__FLOW_RUN_ID": sys.argv[1]}, {"PREFECT__FLOW_RUN_ID": sys.argv[2]}, {}
words = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]
runs = [subprocess.Popen(words, env=os.environ | each, stdout=subprocess.PIPE) for each in started]
for run in runs:
    run.stdout.readline()
print("begun", flush=True)
signal.pause()
"""
"""A worker with the processes of two flow runs, and one that is none."""


MINE, DONE = str(UUID(int=1)), str(UUID(int=2))


class Api(Quiet):
    """The part of Prefect's API that `down` asks; keeps the states that it sets and whether the worker then lived."""

    states: ClassVar[dict[str, str]] = {MINE: "RUNNING", DONE: "RUNNING"}
    asked: ClassVar[list[tuple[str, str, bool]]] = []
    broken = False

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        worker = worker_of(Path(os.environ["PREFECT_HOME"]))
        alive = psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE
        answer: Any = {"state": None, "status": "ACCEPT", "details": {"type": "accept_details"}}
        if self.path.endswith("/set_state"):
            run = self.path.split("/")[-2]
            self.asked.append((run, body["state"]["type"], alive))
            self.states[run] = "COMPLETED" if run == DONE else body["state"]["type"]
        else:
            runs = body["flow_runs"]["id"]["any_"]
            answer = [{"id": run, "name": run, "flow_id": run, "state_type": self.states[run]} for run in runs]
        self.send_response(404 if self.broken else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def do_GET(self) -> None:
        self.send_error(404)  # it has no CSRF tokens


def worker_of(home: Path) -> int:
    """Process id of the worker."""
    return json.loads((home / "up.json").read_text())[0]["pid"]


@pytest.fixture
def worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Api]]:
    """A worker that `entente up` recorded, whose flow runs MINE and DONE are known to an API; the second one ends in time."""
    api = type("Asked", (Api,), {"states": {**Api.states}, "asked": []})
    monkeypatch.setenv("PREFECT_HOME", str(folder / ".prefect"))
    monkeypatch.setattr(up, "ENDS_WITHIN_S", 0.5)  # its runs do not end by themselves
    log = folder / ".prefect" / "worker.log"
    with answering(api) as address:
        more = {"PREFECT_API_URL": f"{address}/api", "PREFECT_API_AUTH_STRING": "entente:key"}
        process = up._start("worker", ["-c", WORKER, MINE, DONE], log, more)
        wait_until(lambda: "begun" in log.read_text())
        yield api
        for each in (process, *psutil.Process(process.pid).children()) if process.poll() is None else ():
            each.kill()
        process.wait()


def test_runs_in_the_worker_are_cancelled_before_it_ends_so_that_no_recovery_starts_them_again(folder: Path, worker: type[Api]):
    done = Entente(folder)("down")
    assert done.returncode == 0 and f"{MINE} cancelled" in done.stdout and "worker          ended" in done.stdout, done
    assert sorted(worker.asked[:2]) == [(MINE, "CANCELLING", True), (DONE, "CANCELLING", True)]
    assert worker.asked[2:] == [(MINE, "CANCELLED", False)], "what was done by then stays done"


def test_another_address_or_pool_is_refused_while_what_was_started_runs(folder: Path, worker: type[Api]):
    (record,) = json.loads((folder / ".prefect" / "up.json").read_text())
    said = f"the worker that `entente up` started here is for {record['address']}"
    refused = Entente(folder)("up", "--port", str(free_port()))
    assert refused.returncode == 2 and said in refused.stderr and "run `entente down` first" in refused.stderr
    with pytest.raises(InputError, match="and work pool 'local': run `entente down` first"):
        (folder / ".prefect" / "up.json").write_text(json.dumps([record | {"pool": "local"}]))
        up._check_started(record["address"], "gpu")
    up._check_started(record["address"].replace("127.0.0.1", "localhost"), "local")


def test_a_worker_that_ends_at_its_start_is_not_taken_for_one_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def ended(what: str, words: list[str], log: Path, more: dict[str, str], held: int, *, pool: str) -> SimpleNamespace:
        log.write_text("no such type\n")
        with socket.socket(fileno=os.dup(held)) as port:
            ports.append(port.getsockname()[1])
        return SimpleNamespace(pid=1, poll=lambda: 1)

    other = SimpleNamespace(name="entente-elsewhere", status="ONLINE", last_heartbeat_time=datetime.now(UTC))
    ports = list[int]()
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{(port := free_port())}/api")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.setattr(up, "_start", ended)
    client: Any = SimpleNamespace(read_workers_for_work_pool=lambda _: [other])
    with pytest.raises(InputError, match="the worker did not start: no such type"):
        up._worker(client, "local")
    assert ports == [port if sys.platform == "linux" else 0], "it keeps the port of the server for this user"


def test_schedules_that_prefect_yaml_does_not_have_any_more_are_removed(capsys: pytest.CaptureFixture[str]):
    """`prefect deploy` keeps those of a deployment without any in the file, and those whose slug was changed there."""

    def deployed(name: str, *slugs: str | None) -> Any:
        plans = [SimpleNamespace(id=f"{name}-{slug}", slug=slug) for slug in slugs]
        return SimpleNamespace(id=name, entrypoint=f"flows/{name}.py:f", name=name, schedules=plans)

    described = [
        {"entrypoint": "flows/cache.py:f", "name": "cache", "schedules": [{"cron": "0 3 * * *", "slug": "nightly"}]},
        {"entrypoint": "flows/train.py:f", "name": "train"},
        {"entrypoint": "flows/free.py:f", "name": "free", "schedules": [{"cron": "0 4 * * *"}]},
    ]
    there = [deployed("cache", "nightly", None), deployed("train", "weekly"), deployed("free", None), deployed("theirs", "daily")]
    removed: list[tuple[str, str]] = []
    client: Any = SimpleNamespace(delete_deployment_schedule=lambda *ids: removed.append(ids))
    up._remove_schedules(client, described, there)
    assert removed == [("cache", "cache-None"), ("train", "train-weekly")]
    assert capsys.readouterr().out.count("that prefect.yaml does not have") == 2


def test_a_server_that_cannot_cancel_them_is_said_and_the_worker_ends(folder: Path, worker: type[Api]):
    worker.broken = True
    done = Entente(folder)("down")
    assert done.returncode == 0 and "recovery may continue them" in done.stdout and "worker          ended" in done.stdout, done


def test_what_cannot_be_is_one_sentence_and_begins_nothing(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    with EndpointServer(a_page) as other:
        port = str(other.server_port)
        for said, where, words, environment in [
            ("there is no prefect.yaml here", tmp_path_factory.mktemp("empty"), ("up",), {}),
            (f"port {port} is in use by something other than a Prefect server", folder, ("up", "--port", port), {}),
            ("no Prefect server answers at PREFECT_API_URL", folder, ("up",), {"PREFECT_API_URL": "http://127.0.0.1:9/api"}),
            ("no deployment of prefect.yaml names work pool 'gpu': choose local", folder, ("up", "--pool", "gpu"), {}),
            ("is not a folder: name another one with PREFECT_HOME", folder, ("up",), {"PREFECT_HOME": "prefect.yaml"}),
        ]:
            refused = Entente(where, **environment)(*words)
            assert refused.returncode == 2 and said in refused.stderr and len(refused.stderr.splitlines()) == 1
            assert not (where / ".prefect" / "up.json").exists()


def test_a_port_that_is_bound_or_does_not_answer_is_refused_and_not_shared():
    """Two servers on one port would get every second request each."""
    with socket.create_server(("127.0.0.1", 0), backlog=0, reuse_port=True) as stopped, socket.socket() as queued:
        queued.connect(place := stopped.getsockname())
        with pytest.raises(InputError, match="in use by something other"):
            up._listen(place[1], "timed out")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(InputError, match=r"cannot be used \(.*in use"):
            up._listen(bound.getsockname()[1], "")


def test_a_server_that_ends_between_two_requests_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_HOME", str(folder / ".prefect"))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "entente:key")
    keys = list[str]()

    def who_answers(address: str, key: str = "", within_s: float = 30.0) -> str:
        keys.append(key)
        if key:
            raise httpx.ConnectError("all connection attempts failed")
        return "refuses"

    monkeypatch.setattr(up, "who_answers", who_answers)
    with pytest.raises(InputError, match=r"answers at PREFECT_API_URL .* \(all connection attempts failed\)"):
        up._server("http://127.0.0.1:9", 9)
    assert keys == ["", "entente:key"]


def test_a_second_up_at_once_is_refused_because_it_would_replace_the_record_of_the_first(folder: Path):
    with file_lock(folder / ".prefect" / "up.lock"):
        refused = Entente(folder, PREFECT_API_URL="http://127.0.0.1:9/api")("up")
    assert refused.returncode == 2 and "another `entente up` or `entente down` is at work here" in refused.stderr


def test_down_is_refused_during_an_up_whose_worker_it_would_drop_from_the_record(folder: Path):
    with file_lock(folder / ".prefect" / "up.lock"):
        (folder / ".prefect" / "up.json").write_text(json.dumps([{"what": "server", "pid": 1, "started": "earlier"}]))
        refused = Entente(folder)("down")
    assert refused.returncode == 2 and "another `entente up` or `entente down` is at work here" in refused.stderr


def test_a_server_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(automations, "ANSWERS_WITHIN_S", 0.5)
    monkeypatch.setattr(automations, "TRIES_AGAIN", 0)
    with socket.socket() as silent:  # it listens, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (silent.getsockname()[1], free_port()):
            monkeypatch.setenv("PREFECT_API_URL", address := f"http://127.0.0.1:{port}/api")
            with pytest.raises(InputError, match=f"the Prefect server at {address} does not answer"), server_client() as client:
                client.read_flows()
