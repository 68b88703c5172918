"""Runs stages one after another, each in a process of its own with a time limit, and keeps each result in a file.

The stage's process group is ended in every case: SIGTERM first, SIGKILL after some seconds. If this process is killed, the stage
ends too (`smoke/stage.py`). A second start reads the results of stages that passed, as long as stage, settings, versions and card
are the same, and nothing that a stage needs was done again.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smoke.job import STAGES, Figures, Job, Stage, StageResult, read_result
from telemetry.child import how_it_ended, last_lines
from telemetry.progress import reporter

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""

Command = Callable[[Stage, Job], Sequence[str]]


def stage_command(stage: Stage, job: Job) -> Sequence[str]:
    """The command line of a stage's process."""
    options = {"--out": job.result(stage.name), "--folder": job.folder, "--device": job.device}
    words = [str(word) for pair in options.items() for word in pair]
    words += ["--shape", job.shape, *(["--model", job.model] if job.model else [])]
    return [sys.executable, "-P", "-m", "smoke.stage", stage.name, *words]


def run_stages(
    job: Job,
    stages: Sequence[Stage],
    facts: Mapping[str, Any],
    *,
    again: bool = False,
    limit_s: float = 0.0,
    command: Command = stage_command,
) -> list[StageResult]:
    """The results of `stages`, in their order.

    Args:
        facts: versions and card; results that were measured under others do not count.
        again: repeat stages that have passed.
        limit_s: limit of each stage in seconds; 0: the stage's own.
        command: the command line of a stage's process.
    """
    job.result("any").parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, StageResult] = {}
    done_now: set[str] = set()
    for number, stage in enumerate(stages, 1):
        missing = [name for name in stage.needs if name in results and not results[name].passed]
        key = _key(stage, job, facts)
        before = None if again or done_now & set(stage.needs) else read_result(job.result(stage.name))
        if missing:
            job.result(stage.name).unlink(missing_ok=True)
            result = StageResult(
                stage=stage.name, state="not run", sentence=f"it needs the stage '{missing[0]}', which has not passed"
            )
        elif before is not None and before.passed and before.key == key:
            result = before
        else:
            done_now.add(stage.name)
            reporter().say(f"{number} of {len(stages)}, {stage.title} ...")
            result = replace(run_process(stage, job, limit_s or stage.limit_s, command(stage, job)), key=key)
            job.result(stage.name).write_text(json.dumps(result.as_object(), indent=1))
        results[stage.name] = result
        reporter().say(f"{number} of {len(stages)}, {stage.title}: {result.state}: {result.sentence}")
        reporter().stage("smoke", number, len(stages))
    return list(results.values())


def figures_in_force(job: Job, facts: Mapping[str, Any]) -> dict[str, Figures]:
    """Figures of all stages that have passed under `facts`, also in an earlier start, by stage."""
    found = {stage.name: (read_result(job.result(stage.name)), _key(stage, job, facts)) for stage in STAGES}
    return {name: result.figures for name, (result, key) in found.items() if result and result.passed and result.key == key}


def run_process(stage: Stage, job: Job, limit_s: float, command: Sequence[str]) -> StageResult:
    """Run a stage's process to its end or its limit; however it ends, there is a result."""
    file, log = job.result(stage.name), job.result(stage.name).with_suffix(".log")
    file.unlink(missing_ok=True)
    began = time.monotonic()
    with log.open("wb") as written:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=written,
            env=_environment(job),
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end_group(process)
    seconds = time.monotonic() - began
    found = read_result(file)
    if found is None or timed_out:
        why = f"it was not done within {limit_s:g} s" if timed_out else f"its process ended {how_it_ended(process.returncode)}"
        found = StageResult(stage=stage.name, state="failed", sentence=f"{why}, without a result", attempt=stage.advice)
    return replace(found, seconds=seconds, log="" if found.passed else last_lines(log))


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End all processes of the group that `process` leads, also those that outlive it."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def _environment(job: Job) -> dict[str, str]:
    return dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": ""} if job.device == "cpu" else {})


def _key(stage: Stage, job: Job, facts: Mapping[str, Any]) -> str:
    whole = {"stage": stage.name, "job": job.as_object(), "model": _changed(job), "facts": facts}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _changed(job: Job) -> float:
    """When the given model's config was written, so that another model in the same folder is another one."""
    config = Path(job.model) / "config.json"
    return config.stat().st_mtime if job.model and config.is_file() else 0.0
