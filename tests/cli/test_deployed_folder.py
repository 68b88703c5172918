"""`entente up` never moves the deployments of another checkout to this one."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from entente.cli.deployed_folder import check_folder, folder_behind
from entente.telemetry.errors import InputError

STEP = "prefect.deployments.steps.set_working_directory"
ENTRYPOINT = "flows/train_policy.py:train_policy"
LISTENS = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); time.sleep(60)"


def deployed(folder: str | Path, entrypoint: str = ENTRYPOINT) -> dict[str, Any]:
    return {"entrypoint": entrypoint, "pull_steps": [{STEP: {"directory": str(folder)}}]}


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
    images = {"entrypoint": ENTRYPOINT, "pull_steps": None}
    check_folder("http://127.0.0.1:4200", [ENTRYPOINT], [deployed(here.parent / "other", "flow.py:etl"), images], moved=False)


def test_the_folder_of_the_server_that_has_a_port_is_named(here: Path):
    with subprocess.Popen(
        [sys.executable, "-c", LISTENS], cwd=here.parent / "other", stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            assert folder_behind(port) == str(here.parent / "other")
        finally:
            server.kill()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert folder_behind(free.getsockname()[1]) == "", "nobody listens"
