"""What a command shows, and where: progress only while it works, and with --json nothing but JSON on standard output."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cyclopts import App

from entente.cli import main
from entente.cli.terminal import json_alone, line_reporter, print_json, show_progress
from entente.telemetry.progress import GameProgress, Reporter, reporter


def test_progress_goes_to_standard_error_for_the_length_of_the_block_only(capsys: pytest.CaptureFixture):
    with pytest.raises(ZeroDivisionError), show_progress():
        reporter().say("half way")
        raise ZeroDivisionError
    reporter().say("nobody looks on any more")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "half way\n")


def test_a_long_stage_is_a_line_a_minute(capsys):
    now = [0.0]
    lines = line_reporter(lambda: now[0])
    for done in range(1, 4):
        lines.stage("playing", done, 4)
        now[0] += 40.0
    lines.stage("playing", 4, 4)
    assert capsys.readouterr().err.splitlines() == ["playing: 3 of 4", "playing: 4 done"]


def test_games_report_each_movement_phase_and_a_game_that_ends_early_counts_as_whole(monkeypatch):
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(Reporter, "stage", lambda self, name, done, total: seen.append((done, total)))
    monkeypatch.setattr("entente.telemetry.progress._reporter", Reporter())
    progress = GameProgress("games", 2, 20)
    for phase in ("S1901M", "F1901M", "F1901R", "W1901A"):
        progress.played("first", phase)
    progress.ended("first")
    progress.played("second", "S1901M")
    assert seen == [(1, 80), (2, 80), (40, 80), (41, 80)]


NOISY = """
import ctypes, subprocess, sys
from rich.console import Console
from entente.cli.terminal import json_alone, print_json
with json_alone():
    print("a line")
    Console().print("a table")
    sys.stdout.write("no line")
    ctypes.CDLL(None).puts(b"a library in C"); ctypes.CDLL(None).fflush(None)
    subprocess.run([sys.executable, "-c", "print('a child')"], check=True)
    print_json({"score": float("nan"), "all": [float("inf"), 1.5, "\\u00fc"]})
print("after")
"""


def test_with_json_standard_output_has_json_alone_whoever_else_prints():
    done = subprocess.run(
        [sys.executable, "-c", NOISY], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    first, after = done.stdout.splitlines()
    assert json.loads(first, parse_constant=pytest.fail) == {"score": None, "all": [None, 1.5, "ü"]} and after == "after"
    for noise in ("a line", "a table", "no line", "a library in C", "a child"):
        assert noise in done.stderr


@pytest.mark.parametrize("value", ["", "=true", "=True", "=1", "=yes", "=Y", "=t"])
def test_however_json_is_asked_for_standard_output_has_it_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
):
    app = App()

    @app.default
    def command(*, json: bool = False) -> None:
        sys.stdout.write("a line\n")
        if json:
            print_json(["this"])

    monkeypatch.setattr(main, "command_line", lambda: app)
    monkeypatch.setattr("entente.prefect_server.environment.prepare_environment", lambda **how: None)
    main._call([f"--json{value}"], debug=False)
    assert capsys.readouterr() == ('["this"]\n', "a line\n")


def test_json_goes_to_a_stand_in_for_standard_output_too(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ZeroDivisionError), json_alone():
        sys.stdout.write("noise\n")
        print_json(["this"])
        raise ZeroDivisionError
    print_json("later")
    assert capsys.readouterr() == ('["this"]\n"later"\n', "noise\n")


@pytest.mark.parametrize("words", ["doctor", "doctor --json", "runs clean --dry-run"])
def test_a_reader_that_closes_the_output_ends_every_command_with_141(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: str
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("entente.prefect_server.environment.prepare_environment", lambda **how: None)
    Path("runs").mkdir()
    Path("runs", ".left.1-ab.tmp").touch()
    os.utime("runs/.left.1-ab.tmp", (0, 0))
    kept = os.dup(1)
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    try:
        with open(1, "w", closefd=False) as closed:
            monkeypatch.setattr(sys, "stdout", closed)
            code = main.run(words.split())
    finally:
        os.dup2(kept, 1)
        for descriptor in (kept, writer):
            os.close(descriptor)
    assert code == 141
