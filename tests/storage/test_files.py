"""The interface to the files: published once, whole or not at all; whoever puts another store behind it runs these."""

import os
from pathlib import Path

import pytest

from storage.bucket import BucketFiles
from storage.file_store import FileStore
from storage.files import PosixFiles, publish_file
from storage.objects import Objects
from tests.storage.object_store import BUCKET, environment


@pytest.fixture(params=["posix", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    """Every store there is."""
    if request.param == "posix":
        return PosixFiles()
    for name, value in environment(request.getfixturevalue("object_store"), tmp_path).items():
        monkeypatch.setenv(name, value)
    return BucketFiles(Objects(BUCKET), tmp_path.name, tmp_path)


def test_the_first_to_publish_a_name_keeps_it(store: FileStore, tmp_path: Path) -> None:
    final = tmp_path / "deep" / "er" / "name"
    assert store.publish(final, lambda temp: temp.write_bytes(b"first")) is True
    assert store.publish(final, lambda temp: temp.write_bytes(b"second")) is False
    assert store.open(final).read() == b"first" and store.names(final.parent) == ["name"]
    assert store.folders(tmp_path) == ["deep"] and store.names(tmp_path / "nowhere") == store.folders(tmp_path / "no") == []


def test_what_cannot_be_finished_leaves_nothing_and_the_name_free(store: FileStore, tmp_path: Path) -> None:
    def full(temp: Path) -> None:
        temp.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.publish(tmp_path / "name", full)
    assert list(tmp_path.iterdir()) == []
    assert store.publish(tmp_path / "name", lambda temp: temp.write_bytes(b"whole"))


def test_who_has_a_file_open_keeps_it_when_its_name_goes(store: FileStore, tmp_path: Path) -> None:
    store.publish(tmp_path / "name", lambda temp: temp.write_bytes(b"held" * 5000))
    held = store.open(tmp_path / "name")
    store.remove(tmp_path / "name")
    store.remove(tmp_path / "name")  # and a second time is nothing
    assert held.read() == b"held" * 5000 and not store.exists(tmp_path / "name")
    with pytest.raises(FileNotFoundError):
        store.open(tmp_path / "name")


@pytest.mark.parametrize("error", [FileExistsError(17, "exists"), OSError(5, "lost")], ids=["taken", "no answer"])
def test_a_link_that_was_made_though_its_answer_says_otherwise_counts_as_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """As a network file system may do that sends a request twice."""
    link = os.link

    def lies(source: Path, target: Path) -> None:
        link(source, target)
        raise error

    monkeypatch.setattr(os, "link", lies)
    (tmp_path / ".temp").write_bytes(b"mine")
    assert publish_file(tmp_path / ".temp", tmp_path / "final") is True
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_link_that_failed_for_another_reason_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(source: Path, target: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "link", fails)
    (tmp_path / ".temp").write_bytes(b"mine")
    with pytest.raises(OSError, match="Input/output"):
        publish_file(tmp_path / ".temp", tmp_path / "final")
    assert list(tmp_path.iterdir()) == []
