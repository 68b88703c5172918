"""A version is published whole, read back equal, and refused if a single bit is wrong."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from entente.game.board import Board
from entente.telemetry.errors import DataError
from state_cache.settings import CacheSettings
from state_cache.store import find_cache, open_cache, version_name, write_cache

FILES = ["train.arrow", "held_out.arrow", "manifest.json"]


@pytest.fixture
def published(small, tmp_path: Path) -> Path:
    return write_cache(tmp_path, *small)


def test_what_was_written_is_read_back(small, published: Path) -> None:
    settings, train, held_out = small
    cache = open_cache(published)
    assert (cache.settings, list(cache.train), list(cache.held_out)) == (settings, train, held_out)
    assert cache.path == published
    assert sorted(file.name for file in published.iterdir()) == sorted(FILES)
    restored = Board.restore(cache.train[0])
    assert (restored.phase, restored.centre_counts()) == (train[0].phase, train[0].centres)


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"players": ("mover",)}, {"last_year": 1908}, {"held_out_snapshots": 111}],
    ids=str,
)
def test_other_settings_have_another_folder(change: dict) -> None:
    assert version_name(CacheSettings(**change)) != version_name(CacheSettings())


def test_a_published_version_is_never_changed(small, published: Path, tmp_path: Path) -> None:
    settings, train, _ = small
    before = {file.name: (file.stat().st_ino, file.read_bytes()) for file in published.iterdir()}
    assert write_cache(tmp_path, settings, train[:1], []) == published
    assert {file.name: (file.stat().st_ino, file.read_bytes()) for file in published.iterdir()} == before


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_refused_by_name(published: Path, name: str) -> None:
    content = (published / name).read_bytes()
    rng = random.Random(name)
    for at in {*rng.sample(range(len(content)), min(len(content), 60)), 0, len(content) - 1}:
        damaged = bytearray(content)
        damaged[at] ^= 1 << rng.randrange(8)
        (published / name).write_bytes(damaged)
        with pytest.raises(DataError, match=name):
            open_cache(published)


def test_a_manifest_that_was_edited_is_refused(published: Path) -> None:
    manifest = json.loads((published / "manifest.json").read_text())
    manifest["settings"]["seed"] += 1
    (published / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"manifest\.json was changed"):
        open_cache(published)


def test_another_schema_is_refused(small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr("state_cache.store.SCHEMA_VERSION", 1)
        published = write_cache(tmp_path, *small)
    with pytest.raises(DataError, match=r"manifest\.json has schema version 1; this program reads 5"):
        open_cache(published)


def test_a_writer_that_dies_leaves_nothing_behind(small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(source: Path, target: Path) -> None:
        raise OSError("disk gone")

    with monkeypatch.context() as dying, pytest.raises(OSError, match="disk gone"):
        dying.setattr("storage.files.os.rename", die)
        write_cache(tmp_path, *small)
    assert find_cache(tmp_path, small[0]) is None and not list(tmp_path.iterdir())
    assert open_cache(write_cache(tmp_path, *small)).settings == small[0]


def test_a_folder_that_is_no_version_but_has_its_name_is_refused(small, tmp_path: Path) -> None:
    taken = tmp_path / version_name(small[0])
    taken.mkdir()
    with pytest.raises(DataError, match=f"{taken.name} exists and is never overwritten; remove it"):
        write_cache(tmp_path, *small)
    assert list(tmp_path.iterdir()) == [taken]


def test_two_writers_at_once_publish_one_version(small, published: Path, tmp_path: Path) -> None:
    """The second writer finds that the folder exists when it renames its own."""
    root = tmp_path / "race"
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        shutil.copytree(published, target)
        rename(source, target)

    with pytest.MonkeyPatch.context() as racing:
        racing.setattr("storage.files.os.rename", late)
        path = write_cache(root, *small)
    assert [file.name for file in root.iterdir()] == [path.name]
    assert list(open_cache(path).train) == small[1]
