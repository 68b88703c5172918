"""`entente runs clean` says what goes and removes just that; on a dry run, and of a run at work, it removes nothing."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from storage.files import file_lock
from storage.runs import RunPaths


@pytest.fixture
def runs(entente) -> Any:
    """Two runs at rest, `done` and `going`, of 30 versions and 4 checkpoints each; the first has its summary."""
    made = {}
    for name in ("done", "going"):
        paths = made[name] = RunPaths(entente.folder / "runs" / name).create()
        paths.settings.write_text("{}")
        for folder in [paths.adapter(version) for version in range(1, 31)] + [paths.checkpoint(step) for step in range(27, 31)]:
            folder.mkdir()
            (folder / "manifest.json").write_text("{}")
            (folder / "weights").write_bytes(b"\0" * (1 << 20))
    made["done"].summary.write_text("{}")
    return made


def content(folder: Path) -> dict[str, int]:
    """Every file and folder below but locks, with its size."""
    files = (path for path in sorted(folder.rglob("*")) if "lock" not in path.name)
    return {str(path.relative_to(folder)): path.stat().st_size if path.is_file() else -1 for path in files}


def test_a_dry_run_names_what_goes_with_its_size_and_touches_nothing_and_just_that_goes_then(entente, runs):
    before = content(entente.folder)
    done = entente("runs", "clean", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert content(entente.folder) == before
    told = [re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines()]
    for name in ("done", "going"):
        # Versions 1 to 10 are not among the newest 20; 25 is a milestone and among them anyway.
        assert [f"runs/{name}/adapters", "adapter of an old version", "10", "v000001 … v000010", "10.0 MiB"] in told
        assert [f"runs/{name}/checkpoints", "old checkpoint", "2", "step_000027 … step_000028", "2.0 MiB"] in told
    assert "24.0 MiB would be freed" in done.stdout and done.stdout.endswith("nothing was removed\n")
    done = entente("runs", "clean")
    assert (done.returncode, done.stderr) == (0, "") and "24.0 MiB were freed" in done.stdout
    gone = {"/".join(name.split("/")[1:4]) for name in before.keys() - content(entente.folder).keys()}
    adapters = {f"adapters/v{version:06d}" for version in range(1, 11)}
    assert gone == {f"{run}/{path}" for run in runs for path in (*adapters, "checkpoints/step_000027", "checkpoints/step_000028")}
    again = entente("runs", "clean")
    assert again.stdout == "nothing is old enough to go\n"


@pytest.mark.parametrize(("lock", "words"), [("lock", []), ("trainer_lock", ["--run", "going"])])
def test_a_run_at_work_is_left_alone_and_that_is_said(entente, runs, lock: str, words: list[str]):
    name = "going"
    (runs[name].checkpoints / ".step_000031.writing").mkdir()
    with file_lock(getattr(runs[name], lock)) as mine:
        assert mine
        before = content(runs[name].root)
        done = entente("runs", "clean", *words, "--keep-adapters", "1")
        assert done.returncode == 0, done.stderr
        assert f"runs/{name}: left alone, a process is at work on it" in done.stdout
        assert content(runs[name].root) == before


def test_a_run_that_is_named_is_cleaned_alone(entente, runs):
    before = content(runs["done"].root)
    done = entente("runs", "clean", "--run", "going", "--keep-adapters", "5")
    assert done.returncode == 0, done.stderr
    assert content(runs["done"].root) == before
    left = sorted(int(path.name[1:]) for path in runs["going"].adapters.iterdir())
    assert left == [25, 26, 27, 28, 29, 30]


def test_a_run_keeps_as_many_adapters_as_its_own_settings_say(entente, runs):
    runs["going"].settings.write_text('{"retention": {"keep_adapters": 28}}')
    done = entente("runs", "clean", "--shards-gb", "1")
    assert done.returncode == 0, done.stderr
    left = {name: len(list(paths.adapters.iterdir())) for name, paths in runs.items()}
    assert left == {"going": 28, "done": 20}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--run", "../elsewhere"], "cannot name a folder"),
        (["--run", "link"], "there is no run 'link'"),
    ],
)
def test_what_cannot_be_cleaned_is_refused_in_a_sentence_and_nothing_goes(entente, runs, words: list[str], sentence: str):
    (entente.folder / "runs" / "link").symlink_to(runs["done"].root, target_is_directory=True)
    before = content(entente.folder)
    done = entente("runs", "clean", *words)
    assert done.returncode == 2 and sentence in done.stderr, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1 and content(entente.folder) == before


def test_a_run_whose_ledger_cannot_be_read_keeps_everything(entente, runs):
    ledger = runs["going"].ledger / "step-000031.arrow"
    ledger.write_bytes(b"torn")
    done = entente("runs", "clean")
    assert done.returncode == 0, done.stderr
    assert "runs/going: skipped, because" in done.stdout and "step-000031.arrow" in done.stdout
    assert len(list(runs["going"].adapters.iterdir())) == 30 and len(list(runs["done"].adapters.iterdir())) == 20


def test_nothing_is_removed_behind_a_link_and_the_sentence_says_how(entente, runs):
    (elsewhere := entente.folder / "elsewhere").mkdir()
    runs["done"].root.rename(elsewhere / "done")
    runs["done"].root.symlink_to(elsewhere / "done")
    before = content(elsewhere)
    assert f"clean it by --runs-root {elsewhere} --run done" in entente("runs", "clean", "--run", "done").stderr
    assert "runs/done: left alone, it is a link" in entente("runs", "clean").stdout
    assert content(elsewhere) == before


def test_what_a_killed_process_left_goes_from_the_folders_beside_the_runs(entente):
    for folder in ("_labels/round-1", "_teacher_games/dumbbot", "_matches", "_models"):
        (entente.folder / "runs" / folder).mkdir(parents=True)
        left = entente.folder / "runs" / folder / ".000004.arrow.999999999-0123abcd.tmp"
        left.write_bytes(b"half")
        os.utime(left, (0, 0))
    assert len(content(entente.folder / "runs")) == 6 + 4
    done = entente("runs", "clean")
    assert done.returncode == 0 and len(content(entente.folder / "runs")) == 6, done
