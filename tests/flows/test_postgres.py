"""Prefect's server on PostgreSQL, for real: trained against with its key, while the database is killed and comes back."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.runs import RunPaths
from tests.command import Entente
from tests.conftest import SMALL_RUN
from tests.flows.test_deployments import KEY, ROOT, Prefect
from tests.test_deploy import DEPLOYMENTS, PODS, TEMPLATE

# Debian keeps them off the path.
FOUND = shutil.which("initdb") or next(map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None)
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(FOUND is None, reason="no PostgreSQL on this machine (apt-get install postgresql)"),
]
OWNER = "postgres" if os.geteuid() == 0 else None
"""PostgreSQL refuses to run as root."""


class Postgres:
    """A cluster of databases in a folder of its own, whose server can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._folder, self._server = folder, None
        if OWNER:
            shutil.chown(folder, OWNER, OWNER)
        password = folder / "password"
        password.write_text("secret\n")
        made = ["initdb", "--username=prefect", f"--pwfile={password}", "--auth=scram-sha-256", "--no-sync", "--encoding=UTF8"]
        done = subprocess.run(self._line(*made, f"--pgdata={folder / 'data'}"), capture_output=True, text=True, **self._as())
        assert done.returncode == 0, done.stderr
        self.start()
        self.ask("create database prefect", database="postgres")

    @property
    def url(self) -> str:
        """As Prefect's server takes it."""
        return f"postgresql+asyncpg://prefect:secret@127.0.0.1:{self.port}/prefect"

    def start(self) -> None:
        """Start the server, and return once it answers."""
        given = {"port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        words = [word for name, value in given.items() for word in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                self._line("postgres", "-D", str(self._folder / "data"), *words), stdout=log, stderr=log, **self._as()
            )
        until = time.monotonic() + 30
        while True:
            try:
                self.ask("select 1", database="postgres")
                return
            except (OSError, self._starting()):
                assert self._server.poll() is None and time.monotonic() < until, "the server did not start"
                time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL to the server; its children notice, and end."""
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def ask(self, sql: str, database: str = "prefect") -> list[Any]:
        """The rows that the database answers with."""
        import asyncpg

        async def ask() -> list[Any]:
            connection = await asyncpg.connect(
                host="127.0.0.1", port=self.port, user="prefect", password="secret", database=database, timeout=10
            )
            try:
                return await connection.fetch(sql)
            finally:
                await connection.close()

        return asyncio.run(ask())

    @staticmethod
    def _starting() -> type[Exception]:
        from asyncpg.exceptions import CannotConnectNowError

        return CannotConnectNowError

    @staticmethod
    def _line(program: str, *words: str) -> list[str]:
        assert FOUND is not None
        return [str(Path(FOUND).resolve().with_name(program)), *words]

    @staticmethod
    def _as() -> dict[str, Any]:
        return {"user": OWNER, "group": OWNER, "extra_groups": []} if OWNER else {}


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    """PostgreSQL in a folder that its own user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="entente-postgres-"))
    found = Postgres(folder)
    try:
        yield found
    finally:
        found.kill()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def prefect(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    """Prefect's server on it, with a key."""
    folder = tmp_path_factory.mktemp("prefect")
    server = Prefect(folder, folder / "runs", PREFECT_API_DATABASE_CONNECTION_URL=postgres.url)
    try:
        server.begin("server", "start", "--host", "127.0.0.1", "--port", server.address.rsplit(":", 1)[1])
        server.wait(120, "the server's start", server.healthy)
        yield server
    finally:
        left = server.end()
    assert left == [], "processes that outlived the server"


def ready(prefect: Prefect) -> bool:
    """Whether the server says that it reaches its database; a probe asks so, without the key."""
    try:
        with urllib.request.urlopen(f"{prefect.address}/api/ready", timeout=20) as answer:
            return answer.status == 200
    except urllib.error.HTTPError as refused:
        with refused:
            assert refused.code == 503
        return False


def test_a_run_goes_on_while_the_database_is_killed_and_comes_back(
    postgres: Postgres, prefect: Prefect, tmp_path: Path, small_model: Path
):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "_models").symlink_to(small_model.parent)
    (tmp_path / "small.toml").write_text(SMALL_RUN)
    command = Entente(tmp_path, PREFECT_API_URL=f"{prefect.address}/api", PREFECT_API_AUTH_STRING=KEY)
    paths = RunPaths(tmp_path / "runs" / "mine")
    with command.start("train", "--config", "small.toml", "--run", "mine") as run:
        try:
            prefect.wait(120, "the first step", lambda: run.poll() is not None or steps(paths))
            postgres.kill()
            prefect.wait(30, "the end of the database", lambda: not ready(prefect))
            prefect.wait(60, "the last step", lambda: run.poll() is not None or steps(paths) == 2)
            time.sleep(2)  # the run needs the server now, for its next state
            assert run.poll() is None, run.communicate()[1]
            postgres.start()
            _, err = run.communicate(timeout=180)
        finally:
            run.kill()
    assert run.returncode == 0, err
    ended = postgres.ask("select name, state_type from flow_run where parent_task_run_id is null")
    assert [(each["name"], each["state_type"]) for each in ended] == [("train-mine", "COMPLETED")]
    assert steps(paths) == 2 and paths.summary.is_file()


def steps(paths: RunPaths) -> int:
    """Steps that the run has trained on."""
    return len(list(paths.ledger.rglob("step-*.arrow")))


def test_the_setup_job_makes_pool_deployments_and_automations(postgres: Postgres, prefect: Prefect):
    (setup,) = PODS["Job/setup"]["containers"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    words, environment = [*setup["command"], *setup["args"]], prefect.environment | {"PATH": path}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    (pool,) = prefect.ask("work_pools/filter", {})
    assert (pool["name"], pool["type"]) == ("kubernetes", "kubernetes") and pool["base_job_template"] == TEMPLATE
    found = {each["name"]: each for each in prefect.ask("deployments/filter", {})}
    assert {name: each["job_variables"] for name, each in found.items()} == {
        name: each["work_pool"]["job_variables"] for name, each in DEPLOYMENTS.items()
    }
    assert {each["work_pool_name"] for each in found.values()} == {"kubernetes"}
    (count,) = postgres.ask("select count(*) from automation")
    assert count["count"] == 4
    # A field that the template lacks is refused when the run is created, not by Kubernetes.
    with pytest.raises(urllib.error.HTTPError) as refused:
        given = {"job_variables": {"cpu": 4}, "parameters": {"run": "mine"}}
        prefect.ask(f"deployments/{found['play-rollouts']['id']}/create_flow_run", given)
    with refused.value as answer:
        assert answer.code == 422 and "cpu" in answer.read().decode()
