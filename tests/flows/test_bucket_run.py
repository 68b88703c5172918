"""A whole run in a bucket: trained, killed with its machine and its store, resumed on an empty disk, and read from a third."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.adapters import read_adapter
from storage.files import FILES
from storage.objects import Objects
from storage.run_roots import INHERITED
from storage.runs import RunPaths
from tests.chaos.audit_run import audit
from tests.command import Entente
from tests.conftest import SMALL_RUN
from tests.storage.object_store import BUCKET, Proxy, Seaweed, environment, moto_server

pytestmark = pytest.mark.system
URL = f"s3://{BUCKET}/runs"
TRAIN = ("train", "--runs-root", URL, "--run", "mine")


def machine(folder: Path, address: str, prefect: str) -> Entente:
    """The command on a machine of its own: it shares neither folder nor cache with another."""
    folder.mkdir()
    (folder / "small.toml").write_text(SMALL_RUN)
    return Entente(folder, PREFECT_API_URL=prefect, **environment(address, folder / "cache"))


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], RunPaths]]:
    """Copies the run out of the bucket, as any tool would: each object to a file of its name."""
    monkeypatch.setattr(FILES, "mounted", {})
    monkeypatch.setenv(INHERITED, "{}")

    def copy(address: str) -> RunPaths:
        for name, value in environment(address, tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        objects = Objects(BUCKET)
        for meta in objects.below("runs/mine/"):
            file = tmp_path / "copy" / meta.key
            file.parent.mkdir(parents=True, exist_ok=True)
            found = objects.read(meta.key)
            assert found is not None
            file.write_bytes(found[0])
        return RunPaths(tmp_path / "copy" / "runs" / "mine")

    yield copy


def same_weights(one: RunPaths, other: RunPaths, versions: int) -> bool:
    return all(read_adapter(one, version) == read_adapter(other, version) for version in range(1, versions + 1))


def test_a_run_in_a_bucket_is_the_local_one_and_is_resumed_from_an_empty_disk_and_read_from_anywhere(
    tmp_path: Path, prefect_server: str, trained: Any, copied: Callable[[str], RunPaths]
) -> None:
    with moto_server() as address:
        first, second, third = (machine(tmp_path / name, address, prefect_server) for name in ("first", "second", "third"))
        done = said(first.process(*TRAIN, "--config", "small.toml", "--json"))
        assert json.loads(done.splitlines()[-1])["steps"] == 2 and f"the run lies in {URL}/mine" in done
        shutil.rmtree(first.folder / "cache")
        said(second.process(*TRAIN, "--resume", "--steps", "3", "--json"))
        copy = copied(address)
        audit(copy, 3)
        assert same_weights(copy, trained[1], 2)
        settings = copy.settings.read_text()
        assert URL in settings and not any(word in settings for word in ("secret", str(tmp_path), address))

        root = ("--runs-root", URL, "--run", "mine")
        assert "3" in said(third.process("sql", *root, "select count(distinct step) from batches"))
        said(third.process("report", *root, "--output", "page.html"))
        assert "mine" in (third.folder / "page.html").read_text()
        assert "3 of 3 steps" in said(third.process("watch", *root, "--once"))
        assert "bitwise" in said(third.process("runs", "replay-step", *root, "--step", "3"))
        cleaned = said(third.process("runs", "clean", "--runs-root", URL, "--no-prefect"))
        assert "old checkpoint" in cleaned and str(tmp_path) not in cleaned
        assert [meta.key for meta in Objects(BUCKET).below("runs/mine/checkpoints/step_000001/")] == []
        again = third.process(*TRAIN, "--config", "small.toml")
        assert again.returncode == 2 and f"run 'mine' exists already in {URL}" in again.stderr


def test_a_run_outlives_its_store_and_its_machine(
    tmp_path: Path, prefect_server: str, trained: Any, copied: Callable[[str], RunPaths]
) -> None:
    (tmp_path / "store").mkdir()
    store = Seaweed(tmp_path / "store")
    store.start()
    try:
        with Proxy(upstream=store.address).serving() as proxy:
            lost, next_one = (machine(tmp_path / name, proxy.address, prefect_server) for name in ("lost", "next"))
            proxy.delay_s = 0.01
            proxy.fault("PUT", "/ledger/", drop=True)
            proxy.fault("PUT", "/shards/", times=2, status=503)
            proxy.fault("PUT", "manifest.json", times=2, drop=True)
            proxy.fault("GET", ".arrow", times=2, cut=True)
            training = lost.start(*TRAIN, "--config", "small.toml", "--steps", "30")
            wait_for(proxy, "PUT", "/ledger/step-000001.arrow", training)
            store.kill()
            time.sleep(2)
            store.start()
            wait_for(proxy, "PUT", "/ledger/step-000003.arrow", training)
            training.kill()
            training.communicate()
            proxy.fault("GET", ".safetensors", times=2, cut=True)
            proxy.fault("PUT", "/ledger/", times=2, status=500)
            said(next_one.process(*TRAIN, "--resume", "--steps", "5"))
            copy = copied(proxy.address)
        audit(copy, 5)
        assert same_weights(copy, trained[1], 2)
    finally:
        store.kill()


def wait_for(proxy: Proxy, method: str, part: str, training: subprocess.Popen[str]) -> None:
    """Until this request was sent."""
    until = time.monotonic() + 240
    while not any(verb == method and part in path for verb, path in list(proxy.requests)):
        assert training.poll() is None, training.communicate()
        assert time.monotonic() < until, f"no {method} of {part}"
        time.sleep(0.05)
