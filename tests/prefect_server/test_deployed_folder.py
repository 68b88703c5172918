"""`entente up` never moves the deployments of another checkout to this one."""

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entente.prefect_server.deployed_folder import check_folder, folder_behind
from entente.telemetry.errors import InputError
from tests.command import Entente

STEP = "prefect.deployments.steps.set_working_directory"
ENTRYPOINT = "flows/train_policy.py:train_policy"
SERVER = """
import http.server
class WithAnotherKey(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/health" else 401)
        self.end_headers()
        self.wfile.write(b"true")
server = http.server.HTTPServer(("127.0.0.1", 0), WithAnotherKey)
print(server.server_port, flush=True)
server.serve_forever()
"""


def deployed(folder: str | Path, entrypoint: str = ENTRYPOINT) -> Any:
    return SimpleNamespace(entrypoint=entrypoint, pull_steps=[{STEP: {"directory": str(folder)}}])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder; beside it are "other" and "link", which leads here."""
    (tmp_path / "here").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to("here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize(("folder", "moved"), [("other", False), ("other", True), ("gone", False)])
def test_deployments_of_another_folder_are_left_there(here: Path, folder: str, moved: bool):
    other = here.parent / folder
    with pytest.raises(InputError, match=rf"run in another folder, '{other}': choose another server.*--port"):
        check_folder("http://127.0.0.1:4200", [ENTRYPOINT], [deployed(here), deployed(other)], moved=moved)


@pytest.mark.parametrize(("folder", "moved"), [("here", False), ("link", False), ("gone", True)])
def test_those_of_this_folder_are_brought_up_to_date(here: Path, folder: str, moved: bool):
    check_folder("http://127.0.0.1:4200", [ENTRYPOINT], [deployed(here.parent / folder)], moved=moved)


def test_other_projects_on_the_same_server_do_not_matter(here: Path):
    images: Any = SimpleNamespace(entrypoint=ENTRYPOINT, pull_steps=None)
    check_folder("http://127.0.0.1:4200", [ENTRYPOINT], [deployed(here.parent / "other", "flow.py:etl"), images], moved=False)


@pytest.mark.parametrize("folder", ["other", "here"])
def test_a_port_that_another_folder_s_server_has_is_left_to_it(here: Path, folder: str):
    (here / "prefect.yaml").write_text("deployments: [{work_pool: {name: local}}]")
    words = [sys.executable, "-c", SERVER]
    with subprocess.Popen(
        words, cwd=here.parent / folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            done = Entente(here)("up", "--port", port)
        finally:
            server.kill()
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert (f"another folder, '{here.parent / 'other'}': choose another with --port" in done.stderr) == (folder == "other")
    assert ("set PREFECT_API_AUTH_STRING" in done.stderr) == (folder == "here"), "only for one's own server"


def test_a_port_that_nobody_has_belongs_to_no_folder():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert folder_behind(free.getsockname()[1]) == ""
