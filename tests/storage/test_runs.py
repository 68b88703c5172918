"""Whatever bears a final name is whole, and the first to bear it keeps it."""

import os
from pathlib import Path

import pytest

from entente.telemetry.errors import DataError, InputError
from storage.files import durable_write, publish_directory, publish_file
from storage.runs import RunPaths, check_name


def test_paths_of_a_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "runs" / "a").create()
    assert sorted(path.name for path in paths.root.iterdir()) == [
        "adapters",
        "checkpoints",
        "ledger",
        "scores",
        "shards",
    ]
    assert paths.adapter(123) == paths.root / "adapters" / "v000123"
    assert paths.checkpoint(123) == paths.root / "checkpoints" / "step_000123"
    assert [path.name for path in (paths.settings, paths.metrics, paths.trainer_log)] == [
        "settings.json",
        "metrics.jsonl",
        "trainer.log",
    ]
    assert paths.create() == paths


def test_a_file_is_synced_before_it_is_named_and_its_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    sync, link = os.fsync, os.link

    def log_sync(handle: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        sync(handle)

    def log_link(source: Path, target: Path) -> None:
        events.append(f"link {target.name}")
        link(source, target)

    monkeypatch.setattr(os, "fsync", log_sync)
    monkeypatch.setattr(os, "link", log_link)
    (tmp_path / ".temp").write_bytes(b"x")
    publish_file(tmp_path / ".temp", tmp_path / "final")
    assert events == ["sync .temp", "link final", f"sync {tmp_path.name}"]


def test_durable_write_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    durable_write(tmp_path / "a.json", b"1")
    durable_write(tmp_path / "a.json", b"2")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.json", b"2")]


@pytest.mark.parametrize("occupied", [True, False], ids=["full", "empty"])
def test_a_published_folder_is_never_replaced(tmp_path: Path, occupied: bool) -> None:
    (tmp_path / "temp" / "deep").mkdir(parents=True)
    (tmp_path / "temp" / "deep" / "file").write_bytes(b"new")
    publish_directory(tmp_path / "temp", tmp_path / "free")
    assert (tmp_path / "free" / "deep" / "file").read_bytes() == b"new"
    (tmp_path / "taken").mkdir()
    if occupied:
        (tmp_path / "taken" / "file").write_bytes(b"old")
    with pytest.raises(DataError, match="taken"):
        publish_directory(tmp_path / "free", tmp_path / "taken")
    assert not (tmp_path / "taken" / "deep").exists()


@pytest.mark.parametrize("name", ["..", "a/b", "", ".hidden", "a b", "/root"])
def test_a_name_that_leaves_the_run_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="producer"):
        check_name(name, "The producer")
