"""Every command that takes long can say beforehand what it would do: it starts nothing, writes nothing, and exits with 0."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli.commands import command_line
from cli.main import run
from pipeline.run_settings import layered_settings
from storage.runs import RunPaths

LONG = [
    *map(
        str.split,
        (
            "train",
            "improve",
            "serve",
            "produce",
            "evaluate",
            "runs replay-step",
            "runs clean",
            "cache build",
            "cache refresh",
        ),
    ),
    *map(str.split, ("model make", "bench tune")),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder in which nothing may be started, and nothing appears."""

    class Refused(subprocess.Popen):
        """A class, as modules that are imported meanwhile name `Popen[bytes]`."""

        def __init__(self, *words: Any, **how: Any) -> None:
            # Libraries ask these two about the machine while they are imported for the first time.
            assert words[0][0] in ("file", "uname"), f"something was started: {words}"
            super().__init__(*words, **how)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)
    monkeypatch.setattr("subprocess.Popen", Refused)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    """Every file below, byte for byte."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("words", LONG, ids=" ".join)
def test_every_long_command_has_a_dry_run(words: tuple[str, ...]):
    _, apps, _ = command_line().parse_commands(list(words))
    flags = {name for each in apps[-1].assemble_argument_collection() for name in each.names}
    assert "--dry-run" in flags


@pytest.mark.parametrize(
    "words",
    [("cache", "build")],
    ids=" ".join,
)
def test_a_dry_run_says_what_would_be_done_and_does_nothing(here: Path, words: tuple[str, ...], capsys):
    assert run([*words, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["command"] == " ".join(words) and (plan.get("work") or plan.get("candidates"))
    assert content(here) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(("runs", "replay-step", "--run", "nowhere", "--step", "1"), "there is no run", id="replay-step"),
        pytest.param(("cache", "refresh", "--run", "bare"), "run 'bare' has not trained a step yet", id="cache refresh"),
    ],
)
def test_a_dry_run_refuses_what_the_command_would(here: Path, words: tuple[str, ...], said: str, capsys):
    bare = RunPaths(here / "runs" / "bare").create()
    bare.settings.write_text(layered_settings("laptop").model_dump_json())
    before = content(here)
    assert run([*words, "--dry-run"]) == 2
    assert said in capsys.readouterr().err
    assert content(here) == before


def test_what_a_run_left_can_be_looked_at_beforehand(workplace, trained):
    _, paths, _ = trained
    before = {file: file.stat().st_mtime_ns for file in paths.root.rglob("*")}
    for words, work in (
        (("runs", "replay-step", "--run", "first", "--step", "2"), {"steps_replayed", "decisions"}),
        (("cache", "refresh", "--run", "first"), {"start_groups_read"}),
    ):
        done = workplace(*words, "--dry-run", "--json")
        assert done.returncode == 0, done.stderr
        plan = json.loads(done.stdout)
        assert work <= set(plan["work"]) and plan["work"].get("decisions", 1) > 0
    assert {file: file.stat().st_mtime_ns for file in paths.root.rglob("*")} == before
