"""A stage has a process, a limit and a result, however it ends; a second start does only what is left."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from smoke import run_stages as module
from smoke.job import STAGES, Job, Stage, StageResult, chosen_stages, read_result
from smoke.run_stages import run_stages
from telemetry.errors import InputError

FIRST = Stage(name="first", title="the first", needs=(), limit_s=30, advice="try this")
SECOND = Stage(name="second", title="the second", needs=("first",), limit_s=30, advice="try that")
FACTS = {"torch": "2"}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(device="cpu", model="", shape="tiny", folder=tmp_path)


class Program:
    """The command of every stage: a piece of Python, which may end with the result that a real stage writes."""

    def __init__(self, **programs: str) -> None:
        self.programs, self.begun = programs, list[str]()

    def __call__(self, stage: Stage, job: Job) -> Sequence[str]:
        self.begun.append(stage.name)
        passed = StageResult(stage=stage.name, state="passed", sentence="it works", figures={"rate": 1.5})
        failed = replace(passed, state="failed", sentence="it is odd", attempt="another setting")
        results = {"passed": passed.as_object(), "failed": failed.as_object()}
        header = (
            "import json, os, signal, subprocess, sys, time\nfrom pathlib import Path\n"
            f"results = json.loads({json.dumps(json.dumps(results))})\n"
            f"def write(name): Path({str(job.result(stage.name))!r}).write_text(json.dumps(results[name]))\n"
        )
        return [sys.executable, "-c", header + self.programs.get(stage.name, "write('passed')")]


def ends(pid: int) -> bool:
    """Whether a process ends within seconds; one that nobody waits for stays as a zombie."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def states(results: Sequence[StageResult]) -> list[str]:
    return [result.state for result in results]


def test_a_stage_leaves_its_result_in_a_file(job: Job):
    (result,) = run_stages(job, [FIRST], FACTS, command=Program())
    assert (result.state, result.figures, result.log) == ("passed", {"rate": 1.5}, "")
    assert read_result(job.result("first")) == result and result.seconds > 0
    stored = json.loads(job.result("first").read_text())
    assert {"stage": "first", "passed": True, "try": "", "sentence": "it works"}.items() <= stored.items()


def test_a_failure_names_the_setting_to_try_and_ends_with_the_last_lines_of_the_log(job: Job):
    program = Program(first="print('about to', file=sys.stderr); write('failed'); sys.exit(1)")
    (result,) = run_stages(job, [FIRST], FACTS, command=program)
    assert (result.state, result.sentence, result.attempt) == ("failed", "it is odd", "another setting")
    assert result.log == "about to"


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        pytest.param("print('x' * 5, file=sys.stderr); sys.exit(3)", "its process ended with exit code 3", id="exit"),
        pytest.param("print('xxxxx', file=sys.stderr, flush=True); os.kill(0, signal.SIGKILL)", "ended by SIGKILL", id="killed"),
        pytest.param("print('xxxxx', file=sys.stderr, flush=True); time.sleep(60)", "not done within 3 s", id="hangs"),
    ],
)
def test_a_stage_that_leaves_no_result_fails_with_the_advice_of_the_stage(job: Job, program: str, sentence: str):
    program = program if "sleep" in program else program.replace("os.kill(0,", "os.kill(os.getpid(),")
    (result,) = run_stages(job, [FIRST], FACTS, limit_s=3 if "sleep" in program else 30, command=Program(first=program))
    assert result.state == "failed" and sentence in result.sentence and result.attempt == "try this"
    assert result.log == "xxxxx"


def test_a_stage_that_ignores_sigterm_is_killed_with_what_it_started(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "GRACE_S", 0.2)
    program = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"Path({str(job.folder / 'pids')!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(60)"
    )
    (result,) = run_stages(job, [FIRST], FACTS, limit_s=2, command=Program(first=program))
    assert result.state == "failed"
    assert [pid for pid in map(int, (job.folder / "pids").read_text().split()) if not ends(pid)] == []


def test_a_stage_that_passed_leaves_no_process_either(job: Job):
    program = "child = subprocess.Popen(['sleep', '60']); print(child.pid, file=sys.stderr); write('passed')"
    (result,) = run_stages(job, [FIRST], FACTS, command=Program(first=program))
    pid = int((job.folder / "stages" / "first.log").read_text())
    assert result.passed and ends(pid)


def test_what_needs_a_stage_that_failed_says_so_and_is_not_begun(job: Job):
    program = Program(first="write('failed')")
    assert states(run_stages(job, [FIRST, SECOND], FACTS, command=program)) == ["failed", "not run"]
    assert program.begun == ["first"]
    result = run_stages(job, [FIRST, SECOND], FACTS, command=program)[1]
    assert result.sentence == "it needs the stage 'first', which has not passed"


def test_a_second_start_repeats_only_what_has_not_passed(job: Job):
    run_stages(job, [FIRST, SECOND], FACTS, command=Program(second="write('failed')"))
    program = Program()
    results = run_stages(job, [FIRST, SECOND], FACTS, command=program)
    assert states(results) == ["passed", "passed"] and program.begun == ["second"]


@pytest.mark.parametrize(
    ("how", "facts", "device"),
    [
        pytest.param({"again": True}, FACTS, "cpu", id="again"),
        pytest.param({}, {"torch": "3"}, "cpu", id="another version"),
        pytest.param({}, FACTS, "cuda", id="another device"),
    ],
)
def test_what_was_measured_otherwise_is_measured_again(job: Job, how: dict, facts: dict, device):
    run_stages(job, [FIRST, SECOND], FACTS, command=Program())
    program = Program()
    run_stages(replace(job, device=device), [FIRST, SECOND], facts, command=program, **how)
    assert program.begun == ["first", "second"]


def test_a_stage_is_repeated_after_what_it_needs_was_repeated(job: Job):
    run_stages(job, [FIRST, SECOND], FACTS, command=Program())
    job.result("first").write_text("{half of")
    program = Program()
    run_stages(job, [FIRST, SECOND], FACTS, command=program)
    assert program.begun == ["first", "second"]


def test_an_earlier_result_does_not_outlive_a_failure(job: Job):
    run_stages(job, [FIRST], FACTS, command=Program())
    (result,) = run_stages(job, [FIRST], FACTS, again=True, command=Program(first="sys.exit(1)"))
    assert result.state == "failed" and read_result(job.result("first")) == result


def test_on_a_cpu_no_stage_sees_a_card(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    run_stages(job, [FIRST], FACTS, command=Program(first="print(repr(os.environ['CUDA_VISIBLE_DEVICES']), file=sys.stderr)"))
    assert (job.folder / "stages" / "first.log").read_text() == "''\n"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_every_stage_comes_after_what_it_needs_and_has_a_module():
    names = [stage.name for stage in STAGES]
    assert len(set(names)) == len(names)
    for number, stage in enumerate(STAGES):
        assert set(stage.needs) <= set(names[:number])
        assert (Path(module.__file__).parent / "stages" / f"{stage.module.rpartition('.')[2]}.py").is_file()


def test_a_stage_by_name_brings_what_it_needs():
    assert [stage.name for stage in chosen_stages(["jump"])] == ["card", "model", "jump"]
    assert chosen_stages(()) == STAGES
    with pytest.raises(InputError, match="there is no stage 'jmp': --only takes card, model"):
        chosen_stages(["jmp"])
