"""A command has a Prefect server that answers, or says in a sentence why not; its own ends with it."""

import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from entente.prefect_server.own_server import wait_until_up
from entente.telemetry.errors import InputError
from tests.command import Entente
from tests.http_here import Quiet, answering

CACHE = ["cache", "build", "--train-snapshots", "2", "--held-out-snapshots", "2", "--last-year", "1902"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_without_a_server_writes_nothing(entente, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("entente.cli.run_flow.prefect_server", Mock(side_effect=InputError("no Prefect server answers")))
    done = entente("train", "--run", "mine")
    assert (done.returncode, done.stderr) == (2, "entente: no Prefect server answers\n") and names(entente.folder) == []


def test_a_run_whose_client_cannot_use_the_proxy_writes_nothing(tmp_path: Path):
    done = Entente(tmp_path, ALL_PROXY="socks4://127.0.0.1:9")("train", "--run", "mine")
    assert done.returncode == 2 and "proxy or certificate" in done.stderr and names(tmp_path) == []


@pytest.mark.in_turn
@pytest.mark.system
def test_a_server_that_does_not_come_up_is_said_in_its_own_last_words(entente):
    done = entente.process(*CACHE, PREFECT_API_DATABASE_CONNECTION_URL="sqlite+aiosqlite:////nonexistent/prefect.db")
    assert done.returncode == 2 and done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert "the Prefect server did not come up (exit code 3): " in sentence and "unable to open database file" in sentence
    assert names(entente.folder) == [".prefect"]


def test_a_server_that_was_killed_is_not_said_to_have_ended_as_an_earlier_one(tmp_path: Path):
    log = tmp_path / "server.log"
    log.write_text("sqlite3.OperationalError: database is locked\n")
    with pytest.raises(InputError, match=r"exit code -9\): it wrote nothing; "):
        wait_until_up(Mock(poll=lambda: -9, returncode=-9), "http://127.0.0.1:9/api", log, since=log.stat().st_size)


@pytest.mark.system
def test_a_command_that_is_killed_takes_its_server_along(entente, prefect_home):
    prefect_home(entente.folder / ".prefect")
    process = entente.start("cache", "build", "--train-snapshots", "4000")
    try:
        until = time.monotonic() + 120
        family: list[psutil.Process] = []
        while time.monotonic() < until and process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            if family and [each for each in family if each.net_connections("tcp")]:
                break
            time.sleep(0.1)
        assert family, "the command has a server of its own"
    finally:
        process.kill()
        process.communicate()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []


def test_a_child_whose_parent_ended_before_it_looked_ends_too():
    """A server that still imports modules when its command is killed."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    late = (
        f"from entente.telemetry.child import end_with_parent; end_with_parent(parent={ended.pid}); import time; time.sleep(600)"
    )
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", late], cwd=root, timeout=30).returncode == 1


@pytest.mark.in_turn
@pytest.mark.system
def test_commands_begun_at_once_on_a_fresh_home_have_servers_that_answer_to_their_key_alone(tmp_path: Path):
    """Neither a page in a browser nor another user of the machine can ask one anything, whatever host they say they want."""
    program = """
import asyncio, os, urllib.error, urllib.request
from entente.prefect_server.environment import prepare_environment
prepare_environment(debug=False)
from prefect.client.orchestration import get_client
from entente.prefect_server.own_server import prefect_server

async def flows():
    async with get_client() as client:
        return await client.read_flows()

def asked(method, **headers):
    url = os.environ["PREFECT_API_URL"] + "/flows/filter"
    request = urllib.request.Request(url, b"{}", {"content-type": "application/json"} | headers, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers.get("access-control-allow-origin")
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.headers.get("access-control-allow-origin")

with prefect_server():
    assert asyncio.run(flows()) == []
    print(asked("POST"), asked("POST", origin="http://evil.example"), asked("POST", host="evil.example"))
    preflight = {"access-control-request-method": "POST"}
    print(*(asked("OPTIONS", origin=each, **preflight) for each in ("http://evil.example", "null")))
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    root = str(Path(__file__).resolve().parents[2])
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=kept | {"PYTHONPATH": root},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [each.communicate(timeout=180) for each in begun]
    assert [out for out, _ in said] == ["(401, None) (401, None) (401, None)\n(400, None) (400, None)\n"] * 2, said
    assert (tmp_path / ".prefect" / "key").stat().st_mode & 0o777 == 0o600


@pytest.mark.system
def test_a_server_that_wants_another_key_is_one_sentence(entente):
    class Closed(Quiet):
        def do_GET(self) -> None:
            self.send_response(200 if self.path.endswith("/health") else 401)
            self.end_headers()
            self.wfile.write(b"true")

    with answering(Closed) as address:
        done = entente.process(*CACHE, PREFECT_API_URL=f"{address}/api")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "wants another key: set PREFECT_API_AUTH_STRING" in done.stderr


NOTEBOOK = """
import os
from unittest.mock import Mock
from entente.prefect_server import own_server, server_key

def start(log, port):
    own_server.want_key()
    return Mock(), "http://127.0.0.1:9/api"

own_server._start, own_server._check = start, lambda address: None
server_key._SOCKETS = ()  # another user may have a server here
for address in ("", "http://127.0.0.1:4200/api", "http://server.internal:4200/api"):
    if address:
        os.environ["PREFECT_API_URL"] = address
    with own_server.prefect_server():
        print(os.environ["PREFECT_API_URL"], "PREFECT_API_AUTH_STRING" in os.environ)
"""


def test_a_notebook_that_had_a_server_on_this_machine_uses_the_next_one_without_its_key(tmp_path: Path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    here = kept | {"PREFECT_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], cwd=tmp_path, env=here, capture_output=True, text=True, check=True)
    on_this_machine = ["http://127.0.0.1:9/api True", "http://127.0.0.1:4200/api True"]
    assert done.stdout.splitlines() == [*on_this_machine, "http://server.internal:4200/api False"]


GARBAGE = """
import threading, time
from entente.prefect_server import serve as serve_prefect
serve_prefect.BEAT_S = 0.01
serve_prefect.collect_in_thread()
class Held:
    def __init__(self): self.itself = self
    def __del__(self): where.append(threading.current_thread().name)
where = []
until = time.monotonic() + 20
while not where and time.monotonic() < until:
    Held()
    list(map(list, [[]] * 5000))
    time.sleep(0.01)
print(set(where))
"""


def test_garbage_is_collected_in_its_own_thread():
    done = subprocess.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'garbage'}"
