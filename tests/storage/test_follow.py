"""Files are found by name: without listing, in any order of arrival, each once."""

import random
import re
import time
from pathlib import Path

import pytest

from storage import follow
from storage.follow import LOOKAHEAD, NumberedFiles

NAMES = re.compile(r"(\d{6,})\.arrow")


def follow_folder(folder: Path) -> NumberedFiles:
    return NumberedFiles(folder, NAMES, "{:06d}.arrow".format)


def put(folder: Path, *numbers: int) -> None:
    for number in numbers:
        (folder / f"{number:06d}.arrow").touch()


def new(files: NumberedFiles) -> list[int]:
    return [number for number, _ in files.new_files()]


def test_files_that_arrive_out_of_order_are_each_said_once(tmp_path: Path) -> None:
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        rng = random.Random(seed)
        order = sorted(range(40), key=lambda number: number + rng.uniform(0, 16))
        files, said = follow_folder(folder), []
        while order:
            put(folder, *[order.pop(0) for _ in range(min(len(order), rng.randint(0, 6)))])
            found = new(files)
            said += found
            assert sorted(said) == sorted(int(path.stem) for path in folder.iterdir())
        assert len(said) == 40


def test_a_folder_is_listed_once_then_followed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 0, 4)
    files = follow_folder(tmp_path)
    assert new(files) == [0, 4]
    monkeypatch.setattr("os.scandir", None)
    put(tmp_path, 5, 3)
    assert new(files) == [3, 5]
    assert new(files) == []


def test_a_file_beyond_every_guess_is_found_by_the_next_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = follow_folder(tmp_path)
    assert new(files) == []
    put(tmp_path, LOOKAHEAD)
    assert new(files) == []
    files.list_again()
    assert new(files) == [LOOKAHEAD]
    put(tmp_path, 5 * LOOKAHEAD)
    now = time.monotonic()
    monkeypatch.setattr(follow.time, "monotonic", lambda: now + follow.RELIST_SECONDS)
    assert new(files) == [5 * LOOKAHEAD]
