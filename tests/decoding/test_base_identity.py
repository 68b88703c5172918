"""A base is told from every other one by all of its bytes, which are read once as long as the files are the same."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from entente.decoding import base_identity as identities
from entente.decoding.base_identity import base_hashes, base_identity, weights_hash
from tests.decoding.test_weight_files import SHARDS, made_model


def test_a_change_anywhere_makes_another_base_and_names_the_file(tmp_path: Path):
    """The first megabytes of a real model are its embedding, which no adapter changes."""
    folder = made_model(tmp_path / "m", SHARDS)
    before, identity = base_hashes(folder), base_identity(folder)
    for name in (*SHARDS, "config.json", "tokenizer.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        if not name.endswith(".json"):
            assert base_identity(folder) != identity
            now = base_hashes(folder)
            assert [each for each in before if before[each] != now[each]] == [name]
        (folder / name).write_bytes(content)
    assert base_identity(folder) == identity


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read; files settle at once."""
    names, whole = list[str](), identities.file_hash

    def noted(file: Path) -> str:
        names.append(file.name)
        return whole(file)

    monkeypatch.setattr(identities, "file_hash", noted)
    monkeypatch.setattr(identities, "_SETTLED_S", -60.0)
    return names


def test_weights_are_read_once_and_remembered_for_every_folder_name(tmp_path: Path, read: list[str]):
    folder, memory = made_model(tmp_path / "m", SHARDS), tmp_path / "runs" / "_models" / "hashes.json"
    identity = base_identity(folder, memory)
    assert sorted(read) == sorted([*SHARDS, "config.json", "tokenizer.json"])
    assert weights_hash(folder, memory) == weights_hash(folder)
    read.clear()
    folder = folder.rename(tmp_path / "moved")
    assert base_identity(folder, memory) == identity and not read
    assert base_identity(folder) == identity and read, "without a memory all is read"
    memory.write_text("[damaged")
    assert base_identity(folder, memory) == identity and json.loads(memory.read_text())


def in_place(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"\1")


def with_its_old_times(file: Path) -> None:
    """As rsync and cp --preserve leave it: only the time of the inode's change tells."""
    times = file.stat()
    in_place(file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def by_a_rename(file: Path) -> None:
    times = file.stat()
    other = file.with_name("other")
    other.write_bytes(file.read_bytes()[:-1] + b"\1")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(file)


@pytest.mark.parametrize("replace", [in_place, with_its_old_times, by_a_rename])
def test_a_file_that_was_replaced_by_one_of_its_length_is_read_again(
    tmp_path: Path, read: list[str], replace: Callable[[Path], None]
):
    folder, memory = made_model(tmp_path / "m", SHARDS), tmp_path / "hashes.json"
    before = base_hashes(folder, memory)
    read.clear()
    name = min(SHARDS)
    replace(folder / name)
    now = base_hashes(folder, memory)
    assert read == [name] and [each for each in now if now[each] != before[each]] == [name] and now == base_hashes(folder)


def test_a_file_that_changed_just_now_is_not_remembered(tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch):
    """It may change again within one tick of the file system's clock."""
    monkeypatch.setattr(identities, "_SETTLED_S", 60.0)
    folder, memory = made_model(tmp_path / "m"), tmp_path / "hashes.json"
    assert base_identity(folder, memory) == base_identity(folder, memory) and len(read) == 6 and not memory.exists()


def test_a_memory_that_cannot_be_written_costs_time_alone(tmp_path: Path, read: list[str]):
    (tmp_path / "runs").write_text("no folder")
    folder = made_model(tmp_path / "m")
    assert base_identity(folder, tmp_path / "runs" / "hashes.json") == base_identity(folder)
