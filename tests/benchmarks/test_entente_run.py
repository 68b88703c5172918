"""A run that is watched from outside: the books of a whole process tree, and what a failed run says."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import entente_run
from benchmarks.entente_run import RunFigures, quantile, run_entente, tree_cpu_s
from telemetry.errors import TrainingError

_BURN = "import time\nwhile time.process_time() < 0.4: pass"


def test_the_books_of_a_tree_hold_children_and_those_that_have_ended():
    """The parent burns nothing: one child has ended and was waited for, the other is still there."""
    code = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-S', '-c', {_BURN!r}])\n"
        f"child = subprocess.Popen([sys.executable, '-S', '-c', {_BURN + chr(10) + 'print(1, flush=True); input()'!r}],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print('burnt', flush=True); sys.stdin.readline(); child.communicate(b'x')\n"
    )
    parent = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"burnt\n"
        assert 0.7 < tree_cpu_s(parent.pid) < 3.0
    finally:
        parent.communicate(b"x\n")


def test_a_run_that_fails_is_said_with_its_last_words(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(entente_run.sys, "executable", "/bin/false")
    with pytest.raises(TrainingError, match="ended with 1"):
        run_entente([], tmp_path, "none", timeout_s=10)


def test_the_first_step_warms_up_and_does_not_count():
    run = RunFigures(steps=[{"time/step_s": 9.0}, {"time/step_s": 2.0}, {"time/step_s": 3.0}], cpu_s=[20.0, 24.0, 30.0],
                     summary={}, lags=[])  # fmt: skip
    assert run.settled("time/step_s") == [2.0, 3.0]
    assert run.cpu_a_step == pytest.approx(5.0)


def test_quantiles_of_nothing_are_nothing():
    assert quantile([], 0.99) == 0.0 and quantile([0, 1, 2], 0.5) == 1.0
