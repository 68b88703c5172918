"""One screen of a run, drawn from its files."""

import io
import json
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from entente.cli.watch import sparkline, watch
from entente.reports import read_run as reading
from entente.reports.newest import curves, progress
from entente.reports.read_run import RecordedRun, read_run
from storage.runs import RunPaths
from tests.conftest import Entente


@pytest.mark.parametrize(
    ("values", "width", "curve"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 0, 7, 7], 2, "▁█"),
        ([5, 5, 5], 32, "▁▁▁"),
        ([1.0], 32, "▁"),
        ([0] * 90 + [1] * 10, 10, "▁▁▁▁▁▁▁▁▁█"),
    ],
)
def test_a_curve_has_the_means_of_its_stretches_from_lowest_to_highest(values: list[float], width: int, curve: str):
    assert sparkline(values, width) == curve


def test_a_figure_that_is_not_finite_is_no_point_of_its_curve_and_is_named_if_it_is_the_newest():
    steps = {step: {"train/grad_norm": norm} for step, norm in enumerate([1.0, float("nan"), 2.0, float("inf")], 1)}
    run = RecordedRun(
        name="first",
        settings={"steps": 4},
        steps=steps,
        mismatch={},
        summary=None,
        environment=None,
        alerts=[],
        at_work=False,
        quiet_s=0.0,
        troubles=[],
    )
    assert curves(run) == [("gradient", [1.0, 2.0], "inf")]


def test_a_run_that_is_done_is_shown_once_with_curves_time_and_alerts(workplace: Entente, trained, tmp_path):
    paths: RunPaths = trained[1]
    alert = {"name": "entropy", "run": "first", "step": 1, "sentence": "first, step 1: it is low"}
    paths.alerts.write_text(json.dumps(alert) + '\n{"name": "cut')
    try:
        shown = workplace("watch", "--run", "first").stdout
    finally:
        paths.alerts.unlink()
    assert "first: 2 of 2 steps; it is done" in shown
    assert all(
        title in shown
        for title in ("return", "entropy", "versions behind", "prefix hits", "rollouts", "forward", "orchestration")
    )
    assert "GPU" not in shown, "what was not measured is not shown"
    assert "alert (entropy): first, step 1: it is low" in shown and "cut" not in shown


def test_a_run_whose_step_takes_long_is_not_silent_while_its_rollouts_come(stored_run: RunPaths):
    stored_run.summary.unlink()
    for path in (stored_run.root, *stored_run.root.rglob("*")):
        os.utime(path, (time.time() - 600,) * 2)
    assert "nothing was written for 10 minutes" in progress(read_run(stored_run))
    (stored_run.shards / "local" / "000099.arrow").touch()
    assert "nothing was written" not in progress(read_run(stored_run))


@pytest.mark.system
def test_a_run_at_work_is_watched_until_it_is_done(workplace: Entente, trained):
    """In a terminal: the screen follows the files, and the command ends with the run."""
    paths: RunPaths = trained[1]
    summary = paths.summary.read_bytes()
    paths.summary.unlink()
    terminal, theirs = pty.openpty()
    words = ["watch", "--run", "first", "--runs-root", str(paths.root.parent), "--interval-s", "0.2"]
    command = [sys.executable, "-m", "entente.cli.main", *words]
    watching = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "100", "TERM": "xterm"})
    os.close(theirs)
    read: list[str] = []
    reading = threading.Thread(target=_read, args=(terminal, read), name="who looks at the screen")
    reading.start()
    try:
        until = time.monotonic() + 60
        while "it is not at work" not in "".join(read) and time.monotonic() < until:
            time.sleep(0.1)
        assert watching.poll() is None, "the run wrote no summary yet"
        paths.summary.write_bytes(summary)
        assert watching.wait(timeout=60) == 0
        reading.join(timeout=60)
        shown = "".join(read)
        assert "it is not at work" in shown and "it is done" in shown
    finally:
        paths.summary.write_bytes(summary)
        watching.kill()
        watching.wait()
        reading.join()
        os.close(terminal)


def _read(terminal: int, screen: list[str]) -> None:
    """Append all that is written; a terminal whose other end is closed says so with an error."""
    while True:
        try:
            screen.append(os.read(terminal, 1 << 16).decode(errors="replace"))
        except OSError:
            return


def test_each_update_parses_the_new_metrics_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a run of 20,000 steps it parsed all of them every two seconds, 1.3 s of a core beside the run for 76 MB."""
    paths, parsed, record, later = RunPaths(tmp_path / "mine").create(), list[bytes](), reading._record, [2, 3]
    paths.settings.write_text('{"steps": 3}')

    def counted(line: bytes, records: dict[int, dict[str, float]]) -> bool:
        parsed.append(line)
        return record(line, records)

    def log(step: int) -> None:
        with paths.metrics.open("a") as file:
            file.write(json.dumps({"step": step, "time/step_s": 1.0}) + "\n")

    def train(_: float) -> None:
        log(later.pop(0))
        if not later:
            paths.summary.write_text('{"steps": 3}')

    log(1)
    screen = io.StringIO()
    monkeypatch.setattr("entente.cli.watch.Console", lambda **how: Console(file=screen, force_terminal=True, **how))
    monkeypatch.setattr("entente.cli.watch.time.sleep", train)
    monkeypatch.setattr(reading, "_record", counted)
    watch(run="mine", runs_root=tmp_path)
    assert len(parsed) == 3 and "3 of 3 steps; it is done" in screen.getvalue()
