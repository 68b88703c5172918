"""Claims about a candidate's process: the wait for it is bounded, its death is seen at once, its last words are kept, nothing
of it is left. The programs are small ones of the tests' own; the real one is in tests/cli/test_tune.py.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tuning.process import Heard, last_lines, run_program, what_happened

ROOT = Path(__file__).resolve().parents[2]

Try = Callable[..., Heard]


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Try:
    """Run the text of a program; its log is `tmp_path / "log"`."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")

    def run(program: str, *, start_s: float = 30.0, timeout_s: float = 30.0) -> Heard:
        (tmp_path / "tried.py").write_text(program)
        return asyncio.run(
            run_program("tried", {"a": 1}, tmp_path / "log", start_s=start_s, timeout_s=timeout_s, on_message=lambda word: None)
        )

    return run


SAYS = "import json, os, sys\ndef say(**word): print(json.dumps(word), flush=True)\n"


def test_what_a_program_says_is_heard_and_its_job_reaches_it(attempt: Try, tmp_path: Path):
    heard = attempt(
        SAYS + "job = json.load(open(sys.argv[1]))\nsay(ready=1)\nsay(arms=job['a'], there=os.path.isdir(job['scratch']))"
    )
    assert heard.code == 0 and heard.ready == {"ready": 1} and heard.last == {"arms": 1, "there": True}
    assert not (tmp_path / "log.scratch").exists() and not list(tmp_path.glob("*.scratch"))


def test_a_program_that_dies_is_seen_at_once_and_its_last_lines_are_kept(attempt: Try, tmp_path: Path):
    began = time.monotonic()
    heard = attempt(SAYS + "sys.stderr.write('first\\n\\nno room for weights\\n'); sys.stderr.flush(); os.kill(os.getpid(), 9)")
    assert time.monotonic() - began < 20
    assert what_happened(heard, start_s=30, timeout_s=30) == ("not started", "its process ended by SIGKILL without a word")
    assert last_lines(tmp_path / "log") == "first\nno room for weights"


def test_its_own_sentence_is_the_reason_and_death_after_the_start_is_another_state(attempt: Try):
    heard = attempt(SAYS + "say(ready=1)\nsay(failed='the mask is odd')\nsys.exit(1)")
    assert what_happened(heard, start_s=30, timeout_s=30) == ("died", "the mask is odd")


@pytest.mark.parametrize(
    ("program", "bounds", "sentence"),
    [
        pytest.param("", {"start_s": 3.0}, "did not start within inference.start_timeout_s", id="start"),
        pytest.param("say(ready=1)\n", {"timeout_s": 0.3}, "was not done within", id="measuring"),
    ],
)
@pytest.mark.system
def test_a_program_that_hangs_is_ended_with_its_children_when_its_time_is_over(
    attempt: Try, tmp_path: Path, program: str, bounds: dict[str, float], sentence: str
):
    child = "import subprocess, time\np = subprocess.Popen(['sleep', '60'])\n"
    child += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))\n"
    times = {"start_s": 30.0, "timeout_s": 30.0} | bounds
    heard = attempt(SAYS + child + program + "time.sleep(60)", **times)
    state, reason = what_happened(heard, **times)
    assert state == "too slow" and sentence in reason
    deadline = time.monotonic() + 10
    pid = int((tmp_path / "pid").read_text())
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


@pytest.mark.system
def test_a_candidate_ends_when_whoever_started_it_is_killed(tmp_path: Path):
    waits = "import tuning.candidate as c, asyncio, sys\nasync def work(job, say):\n    say({'ready': 1})\n"
    (tmp_path / "tried.py").write_text(waits + "    await asyncio.sleep(60)\nc.main(work)")
    parent = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom tuning.process import run_program\n"
        "def told(word): print('ready', flush=True)\n"
        f"asyncio.run(run_program('tried', {{}}, Path({str(tmp_path / 'log')!r}), start_s=60, timeout_s=60, on_message=told))"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        (child,) = [int(each) for each in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def alive(pid: int) -> bool:
    """Whether it runs; a zombie that nobody has fetched yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
