"""A whole run in a bucket: trained, resumed on a machine with an empty disk, and read from a third."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.files import FILES
from storage.ledger import recorded_steps
from storage.lineages import current_lineage
from storage.run_roots import INHERITED, located
from storage.runs import RunPaths
from tests.command import Entente
from tests.conftest import SMALL_RUN
from tests.storage.object_store import BUCKET, environment, moto_server

URL = f"s3://{BUCKET}/runs"


def machine(folder: Path, address: str, prefect: str) -> Entente:
    """The command on a machine of its own: its own folder and cache, and nothing else in common."""
    folder.mkdir()
    (folder / "small.toml").write_text(SMALL_RUN)
    return Entente(folder, PREFECT_API_URL=prefect, **environment(address, folder / "cache"))


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """This process as a further machine."""
    monkeypatch.setattr(FILES, "mounted", {})
    monkeypatch.setenv(INHERITED, "{}")
    yield


@pytest.mark.system
def test_a_run_in_a_bucket_is_resumed_from_an_empty_disk_and_read_from_anywhere(
    tmp_path: Path, prefect_server: str, run: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moto_server() as address:
        first, second, third = (machine(tmp_path / name, address, prefect_server) for name in ("first", "second", "third"))
        train = ("train", "--runs-root", URL, "--run", "mine")
        done = said(first.process(*train, "--config", "small.toml", "--json"))
        assert json.loads(done.splitlines()[-1])["steps"] == 2 and f"the run lies in {URL}/mine" in done
        shutil.rmtree(first.folder / "cache")
        said(second.process(*train, "--resume", "--steps", "3", "--json"))

        for name, value in environment(address, tmp_path / "here").items():
            monkeypatch.setenv(name, value)
        paths = RunPaths(located(URL) / "mine")
        assert recorded_steps(paths, current_lineage(paths)) == [1, 2, 3]
        settings = FILES.fetch(paths.settings).read_text()
        assert URL in settings and "secret" not in settings and str(tmp_path) not in settings and address not in settings

        root = ("--runs-root", URL, "--run", "mine")
        assert "3" in said(third.process("sql", *root, "select count(distinct step) from batches"))
        said(third.process("report", *root, "--output", "page.html"))
        assert "mine" in (third.folder / "page.html").read_text()
        assert "3 of 3 steps" in said(third.process("watch", *root, "--once"))
        assert "mine" in said(third.process("runs", "--runs-root", URL))
        assert "bitwise" in said(third.process("runs", "replay-step", *root, "--step", "3"))
        assert "nothing was removed" in said(third.process("runs", "clean", "--runs-root", URL, "--dry-run", "--no-prefect"))
        again = third.process(*train, "--config", "small.toml")
        assert again.returncode == 2 and f"run 'mine' exists already in {URL}" in again.stderr
