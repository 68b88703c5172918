"""Starts a candidate's process, reads its messages, and ends it in every case.

The engine's start and the measurement have time limits. The last lines of the log are kept. The whole process group ends, even if
this process is killed.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inference.start_engine import start_limit_s
from tuning.figures import ArmFigures
from tuning.job import Job, Measured, State

LOG_LINES = 15
"""Number of last lines of a log that are kept."""
_LINE_LIMIT = 1 << 22


@dataclass(slots=True)
class Heard:
    """The messages of a program, and how it ended."""

    ready: dict[str, Any] = field(default_factory=dict)
    """The message with the key `ready`; empty if there was none."""
    last: dict[str, Any] = field(default_factory=dict)
    """The last message, other than failures."""
    failed: str = ""
    """Its own message of a failure."""
    timed_out: bool = False
    code: int | None = None


async def measure_in_process(
    job: Job, log: Path, *, timeout_s: float, on_message: Callable[[dict[str, Any]], None] = lambda _: None
) -> Measured:
    """Measure a candidate in its own process. A failure is returned as a state with a reason.

    Args:
        log: file for the output of the process.
        timeout_s: limit in seconds from the engine's start to the figures; the start has the limit of the settings.
        on_message: called with each message of the process.
    """
    began, start_s = time.monotonic(), start_limit_s(job.settings)
    heard = await run_program(
        "tuning.candidate", job.as_object(), log, start_s=start_s, timeout_s=timeout_s, on_message=on_message
    )
    seconds = time.monotonic() - began
    facts = {
        "seconds": seconds,
        "start_s": float(heard.ready.get("ready", 0.0)),
        "cpu_s": float(heard.last.get("cpu_s", 0.0)),
        "engine": heard.ready.get("engine", ""),
        "adapters": heard.ready.get("adapters", ""),
    }
    if "arms" in heard.last and heard.code == 0:
        return Measured(state="measured", arms={arm: ArmFigures(**each) for arm, each in heard.last["arms"].items()}, **facts)
    state, reason = what_happened(heard, start_s=start_s, timeout_s=timeout_s)
    return Measured(state=state, reason=reason, log=last_lines(log), arms={}, **facts)


def what_happened(heard: Heard, *, start_s: float, timeout_s: float) -> tuple[State, str]:
    """State and sentence of a program that did not come to its end."""
    if heard.timed_out and heard.ready:
        return (
            "too slow",
            f"it was not done within {timeout_s:g} s after its start: raise candidate_timeout_s, or ask fewer requests",
        )
    if heard.timed_out:
        return "too slow", f"it did not start within inference.start_timeout_s {start_s:g}: raise that"
    state: State = "died" if heard.ready else "not started"
    return state, heard.failed or f"its process ended {how_it_ended(heard.code)} without a word"


def how_it_ended(code: int | None) -> str:
    """An exit status as text."""
    if code is not None and code < 0:
        return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"


def last_lines(log: Path) -> str:
    """The last lines of a log, without empty ones."""
    try:
        text = log.read_bytes()[-20_000:].decode(errors="replace")
    except OSError:
        return ""
    return "\n".join([line.rstrip()[:300] for line in text.splitlines() if line.strip()][-LOG_LINES:])


async def run_program(
    module: str,
    job: dict[str, Any],
    log: Path,
    *,
    start_s: float,
    timeout_s: float,
    on_message: Callable[[dict[str, Any]], None],
) -> Heard:
    """Run `python -m module JOB` in its own process group until it ends or exceeds its time.

    JOB is written next to the log and kept, so that a candidate can be measured again by hand.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    heard, handed, scratch = Heard(), log.with_suffix(".json"), log.with_suffix(".scratch")
    # A killed process may have left files here.
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    handed.write_text(json.dumps(job | {"scratch": str(scratch.resolve())}))
    with log.open("wb") as written:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            module,
            str(handed.resolve()),
            # Nothing is written to it. It closes when this process ends, and then the child ends.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=written,
            start_new_session=True,
            limit=_LINE_LIMIT,
        )
        try:
            await _listen(process, heard, start_s, timeout_s, on_message)
        finally:
            await _end(process)
            shutil.rmtree(scratch, ignore_errors=True)
        heard.code = process.returncode
    return heard


async def _listen(
    process: asyncio.subprocess.Process,
    heard: Heard,
    start_s: float,
    timeout_s: float,
    on_message: Callable[[dict[str, Any]], None],
) -> None:
    """Read messages until the process ends or exceeds its time."""
    assert process.stdout is not None
    ends = time.monotonic() + start_s
    while True:
        try:
            line = await asyncio.wait_for(process.stdout.readline(), max(0.0, ends - time.monotonic()))
        except TimeoutError:
            heard.timed_out = True
            return
        if not line:
            await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=10)
            return
        message = json.loads(line)
        if "failed" in message:
            heard.failed = message["failed"]
            continue
        if "ready" in message:
            heard.ready = message
            ends = time.monotonic() + timeout_s
        heard.last = message
        on_message(message)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process group of the child."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.shield(process.wait())
