"""A child process has a result however it ends, and nothing of it is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from entente.telemetry.child import ChildResult, find_process, process_start, run_child
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ChildResult]:
    """Run the body of `work(job)`."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")

    def run(body: str, limit_s: float = 60.0) -> ChildResult:
        program = "import os, subprocess, sys, time\nfrom pathlib import Path\nfrom entente.telemetry.child import answer_job\n"
        (tmp_path / "tried.py").write_text(f"{program}def work(job):\n    {body}\nanswer_job(work)\n")
        return asyncio.run(run_child("tried", {"a": 1}, tmp_path / "log" / "tried.log", limit_s=limit_s))

    return run


def test_a_child_returns_an_object(attempt: Callable[..., ChildResult]):
    result = attempt("print('not an answer'); return {'b': job['a'] + 1}")
    assert result.answer == {"b": 2} and result.why == result.log == "" and result.seconds > 0


@pytest.mark.parametrize(
    ("body", "why"),
    [
        pytest.param("raise ValueError('the mask\\nis odd')", "ValueError: the mask is odd", id="fails"),
        pytest.param("os.kill(os.getpid(), 9)", "its process ended by SIGKILL", id="killed"),
        pytest.param("time.sleep(60)", "it was not done within 3 s", id="hangs"),
    ],
)
def test_a_child_that_fails_leaves_a_reason_and_the_end_of_its_log(attempt: Callable[..., ChildResult], body: str, why: str):
    result = attempt(f"print('loading', flush=True); {body}", 3.0 if "sleep" in body else 60.0)
    assert result.answer is None and result.why == why and result.log.startswith("loading")


def test_what_a_child_started_ends_with_it(attempt: Callable[..., ChildResult]):
    result = attempt("return {'pid': subprocess.Popen(['sleep', '60']).pid}")
    assert result.answer is not None and is_gone(result.answer["pid"])


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path):
    pid, program = tmp_path / "pid", tmp_path / "tried.py"
    program.write_text(
        "import os, time\nfrom pathlib import Path\nfrom entente.telemetry.child import answer_job\ndef work(job):\n"
        f"    Path({str(pid)!r}).write_text(str(os.getpid()))\n    time.sleep(60)\nanswer_job(work)\n"
    )
    parent = (
        "import asyncio\nfrom pathlib import Path\nfrom entente.telemetry.child import run_child\n"
        f"asyncio.run(run_child('tried', {{}}, Path({str(tmp_path / 'log')!r}), limit_s=60))"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with subprocess.Popen([sys.executable, "-c", parent], env=environment) as process:
        while not (pid.is_file() and pid.read_text()):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    assert is_gone(int(pid.read_text()))


def is_gone(pid: int) -> bool:
    """Whether a process ends within seconds; a zombie that nobody waits for counts."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_a_stored_process_is_recognised_after_the_clock_was_set_and_no_other_is(monkeypatch: pytest.MonkeyPatch):
    child = subprocess.Popen(["sleep", "60"])
    try:
        start = process_start(child.pid)
        # After a step of the clock psutil computes another start, because the kernel counts from the boot.
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: 1.0)
        found = find_process(child.pid, start)
        assert found is not None and found.pid == child.pid
        assert find_process(child.pid, process_start(os.getpid())) is None, "another process with its pid"
        assert find_process(child.pid, f"another-boot {start.split()[-1]}") is None
    finally:
        child.kill()
    wait_until(lambda: find_process(child.pid, start) is None)  # it has ended, although nobody has waited for it
    child.wait()
    assert process_start(child.pid) == "" and find_process(child.pid, start) is None
