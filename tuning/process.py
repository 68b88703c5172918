"""A candidate's process, as the tuner handles it: start it, read its messages, and end it in every case.

The wait is bounded, for the engine's start and for the rest, and ends at once when the process ends. The last lines of its log
are kept. Nothing of its process group is left behind, not even where this process is killed.
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

from tuning.figures import ArmFigures
from tuning.job import Job, Measured, State

LOG_LINES = 15
"""Last lines of a log that are kept."""
_LINE_LIMIT = 1 << 22


@dataclass(slots=True)
class Heard:
    """What a program said, and how it ended."""

    ready: dict[str, Any] = field(default_factory=dict)
    """Its word that it is ready, with what came along; empty if that never came."""
    last: dict[str, Any] = field(default_factory=dict)
    """Its last word but for failures."""
    failed: str = ""
    """Its own sentence of what failed."""
    timed_out: bool = False
    code: int | None = None


async def measure_in_process(
    job: Job, log: Path, *, timeout_s: float, on_message: Callable[[dict[str, Any]], None] = lambda _: None
) -> Measured:
    """Measure a candidate in a process of its own; whatever happens to it comes back as a state with a reason.

    Args:
        log: file for what the process prints.
        timeout_s: seconds from the engine's start to the figures; for the start: the settings' own bound.
        on_message: called with each message of the process.
    """
    began, start_s = time.monotonic(), job.settings.start_timeout_s
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
    """An exit status in words."""
    if code is not None and code < 0:
        return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"


def last_lines(log: Path) -> str:
    """The end of a log, without empty lines."""
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
    """Run `python -m module JOB` in a process group of its own until it ends or its time is over.

    JOB is written beside the log, and stays there: a candidate can be measured again by hand.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    heard, handed, scratch = Heard(), log.with_suffix(".json"), log.with_suffix(".scratch")
    # What a process that was killed left there goes with the next one, and in the end.
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
            # Nothing is written to it: it closes with this process, and the child ends itself.
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
    """Until the process closes its end, or its time is over."""
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
        word = json.loads(line)
        if "failed" in word:
            heard.failed = word["failed"]
            continue
        if "ready" in word:
            heard.ready = word
            ends = time.monotonic() + timeout_s
        heard.last = word
        on_message(word)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End whatever is left of the process group; the number is the child's own, so nobody else's."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.shield(process.wait())
