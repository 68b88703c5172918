"""What a command shows while it works: only while it works."""

import pytest

from entente.cli.terminal import LineReporter, progress_shown
from entente.telemetry.progress import GameProgress, LogReporter, reporter


def test_progress_goes_to_standard_error_for_the_length_of_the_block_only(capsys: pytest.CaptureFixture):
    with pytest.raises(ZeroDivisionError), progress_shown():
        assert isinstance(reporter(), LineReporter)
        reporter().say("half way")
        raise ZeroDivisionError
    assert type(reporter()) is LogReporter
    reporter().say("nobody looks on any more")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "half way\n")


def test_a_long_stage_is_a_line_a_minute(capsys):
    now = [0.0]
    lines = LineReporter(lambda: now[0])
    for done in range(1, 4):
        lines.stage("playing", done, 4)
        now[0] += 40.0
    lines.stage("playing", 4, 4)
    assert capsys.readouterr().err.splitlines() == ["playing: 3 of 4", "playing: 4 done"]


def test_games_report_each_movement_phase_and_a_game_that_ends_early_counts_as_whole(monkeypatch):
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(LogReporter, "stage", lambda self, name, done, total: seen.append((done, total)))
    monkeypatch.setattr("entente.telemetry.progress._reporter", LogReporter())
    progress = GameProgress("games", 2, 20)
    for phase in ("S1901M", "F1901M", "F1901R", "W1901A"):
        progress.played("first", phase)
    progress.ended("first")
    progress.played("second", "S1901M")
    assert seen == [(1, 80), (2, 80), (40, 80), (41, 80)]
