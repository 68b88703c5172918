"""Runs a module as a child process that returns one JSON object, so that a crash or a hang of it is a result.

    python -m MODULE JOB      JOB: the JSON file that `run_child` writes, with the path of the answer

The child calls `answer_job`. Its process group is ended in every case: at its end, at its time limit, and when the parent is
killed, because its standard input then closes.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entente.telemetry.errors import EntenteError
from entente.telemetry.parent import end_with_pipe

LOG_LINES = 15
"""Last lines of a log that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildResult:
    """How a child process ended."""

    found: dict[str, Any] | None
    """What it returned; None: it failed."""
    why: str = ""
    """Why it failed, in one sentence."""
    log: str = ""
    """Last lines of its log, if it failed."""
    seconds: float = 0.0


async def run_child(
    module: str, job: Mapping[str, Any], log: Path, *, limit_s: float, environment: Mapping[str, str] | None = None
) -> ChildResult:
    """Run `module` on `job` in a process of its own. The job is kept beside `log`, so that it can be run again by hand.

    Args:
        limit_s: seconds after which the process is ended.
        environment: variables that are added.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    handed, answer = log.with_suffix(".job.json"), log.with_suffix(".answer.json")
    answer.unlink(missing_ok=True)
    handed.write_text(json.dumps(dict(job) | {"answer": str(answer.resolve())}))
    began, late = time.monotonic(), False
    with log.open("wb") as written:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            module,
            str(handed.resolve()),
            stdin=asyncio.subprocess.PIPE,
            stdout=written,
            stderr=written,
            start_new_session=True,
            env=os.environ | dict(environment or {}),
        )
        try:
            await asyncio.wait_for(child.wait(), limit_s)
        except TimeoutError:
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await asyncio.shield(child.wait())
            if child.stdin is not None:
                child.stdin.close()
    seconds = time.monotonic() - began
    said = json.loads(answer.read_bytes()) if answer.is_file() else {}
    answer.unlink(missing_ok=True)
    if "found" in said and not late:
        return ChildResult(found=said["found"], seconds=seconds)
    why = (
        f"it was not done within {limit_s:g} s"
        if late
        else said.get("failed") or f"its process ended {how_it_ended(child.returncode)}"
    )
    return ChildResult(found=None, why=why, log=last_lines(log), seconds=seconds)


def answer_job(work: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """In the child: run `work` on the job of the command line, write its answer, and end the process."""
    end_with_pipe()
    job = json.loads(Path(sys.argv[1]).read_text())
    try:
        said: dict[str, Any] = {"found": work(job)}
    except Exception as error:
        traceback.print_exc()
        said = {"failed": in_a_sentence(error)}
    answer = Path(job["answer"])
    part = answer.with_suffix(".part")
    part.write_text(json.dumps(said))
    os.replace(part, answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of vLLM may still run


def in_a_sentence(error: BaseException) -> str:
    """The error and its cause on one line."""
    sentence = str(error) if isinstance(error, EntenteError) else f"{type(error).__name__}: {error}"
    if error.__cause__ is not None:
        sentence += f" ({error.__cause__})"
    return " ".join(sentence.split())[:300]


def last_lines(log: Path) -> str:
    """The last lines of a log, without empty ones."""
    try:
        text = log.read_bytes()[-20_000:].decode(errors="replace")
    except OSError:
        return ""
    return "\n".join([line.rstrip()[:300] for line in text.splitlines() if line.strip()][-LOG_LINES:])


def how_it_ended(code: int | None) -> str:
    """An exit status as text."""
    return f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
