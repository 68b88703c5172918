"""Merged weights outlive no process, however it ended."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from inference.scratch import Scratch

HOLDS_ONE = "from inference.scratch import Scratch; s = Scratch(); print(s.path, flush=True); input()"


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_what_a_killed_process_left_goes_and_what_a_living_one_holds_stays(tmp_path: Path):
    others = [
        subprocess.Popen([sys.executable, "-c", HOLDS_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        folders = [Path((other.stdout or pytest.fail("no output")).readline().strip()) for other in others]
        for folder in folders:
            (folder / "model.safetensors").write_bytes(b"x")
        others[0].kill()
        others[0].wait()
        mine = Scratch()
        assert [folder.exists() for folder in folders] == [False, True] and mine.path.is_dir()
        mine.close()
        mine.close()
        assert not mine.path.exists()
    finally:
        for other in others:
            other.kill()
            other.communicate()


def test_only_our_own_folders_are_looked_at(tmp_path: Path):
    (tmp_path / "entente-mergers").mkdir()
    (tmp_path / "entente-merged-file").write_text("no folder")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "entente-merged-link").symlink_to(tmp_path / "elsewhere")
    Scratch().close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "elsewhere",
        "entente-merged-file",
        "entente-merged-link",
        "entente-mergers",
    ]
