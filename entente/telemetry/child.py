"""Child processes that end with their parent, however it ends, and recognition of recorded processes.

    python -m MODULE JOB                                   a job that returns a JSON object; a crash or hang is a result too
    python -m entente.telemetry.child MODULE ARGUMENTS     any module; ends when its standard input closes

A job's process group is always killed: at its end, at its time limit, and when the parent dies and so closes its stdin.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from entente.telemetry.errors import EntenteError

LOG_LINES = 15
_LOOK_EVERY_S = 0.5
_GRACE_S = 5.0


def process_start(pid: int) -> str:
    """Boot id and clock ticks since boot; '' if there is no such process.

    With the pid this identifies a process, also after the clock is set: a start in seconds since 1970 depends on the clock."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "" if Path("/proc/self/stat").exists() else _start_elsewhere(pid)
    return f"{boot_id()} {int(fields[19])}"  # field 22 of proc_pid_stat(5); the first one here is the third


def _start_elsewhere(pid: int) -> str:
    """Without /proc, as on macOS, which stores the start time."""
    try:
        return str(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return ""


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def find_process(pid: int, start: str) -> psutil.Process | None:
    """None if it has ended."""
    try:
        process = psutil.Process(pid)
        ended = process_start(pid) != start or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return None if ended else process


def end_with_parent(*, gently: bool = False, parent: int = 0) -> None:
    """End this process within a second of its parent's end, even after a kill -9 of the parent.

    Args:
        gently: SIGTERM, then exit after five seconds; else exit at once, which is safe if files survive a kill at any moment.
        parent: required unless `multiprocessing` started the child: the parent may end while the child imports modules.
    """
    started_by = multiprocessing.parent_process()
    parent = parent or (os.getppid() if started_by is None or started_by.pid is None else started_by.pid)
    threading.Thread(target=_watch, args=(parent, gently), name="parent-watch", daemon=True).start()


def end_with_pipe() -> None:
    threading.Thread(target=_wait_for_end, name="parent-watch", daemon=True).start()


def _wait_for_end() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def _watch(parent: int, gently: bool) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    if gently:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
    os._exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildResult:
    answer: dict[str, Any] | None
    why: str = ""
    log: str = ""
    """Tail of its log, if it failed."""
    seconds: float = 0.0


async def run_child(
    module: str, job: Mapping[str, Any], log: Path, *, limit_s: float, environment: Mapping[str, str] | None = None
) -> ChildResult:
    """Run `module` on `job` in a process, killed after `limit_s`. The job is stored beside `log`, to repeat it by hand."""
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
    reply = json.loads(answer.read_bytes()) if answer.is_file() else {}
    answer.unlink(missing_ok=True)
    if "found" in reply and not late:
        return ChildResult(answer=reply["found"], seconds=seconds)
    why = (
        f"it was not done within {limit_s:g} s"
        if late
        else reply.get("failed") or f"its process ended {how_it_ended(child.returncode)}"
    )
    return ChildResult(answer=None, why=why, log=last_lines(log), seconds=seconds)


def answer_job(work: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """In the child: run `work` on the job of the command line and write the answer."""
    end_with_pipe()
    job = json.loads(Path(sys.argv[1]).read_text())
    try:
        reply: dict[str, Any] = {"found": work(job)}
    except Exception as error:
        traceback.print_exc()
        reply = {"failed": in_a_sentence(error)}
    answer = Path(job["answer"])
    part = answer.with_suffix(".part")
    part.write_text(json.dumps(reply))
    os.replace(part, answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of vLLM may still run


def in_a_sentence(error: BaseException) -> str:
    sentence = str(error) if isinstance(error, EntenteError) else f"{type(error).__name__}: {error}"
    if error.__cause__ is not None:
        sentence += f" ({error.__cause__})"
    return " ".join(sentence.split())[:300]


def last_lines(log: Path) -> str:
    try:
        text = log.read_bytes()[-20_000:].decode(errors="replace")
    except OSError:
        return ""
    return "\n".join([line.rstrip()[:300] for line in text.splitlines() if line.strip()][-LOG_LINES:])


def how_it_ended(code: int | None) -> str:
    return f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"


if __name__ == "__main__":
    end_with_pipe()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
