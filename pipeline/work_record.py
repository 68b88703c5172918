"""Which process works at which run, and for which flow run: one small file each, beside the runs.

A run that is started without a name gets one inside its flow, and a flow run that was killed can no longer tell it. So whoever
trains writes it down first, where another host finds it too.
Promise: a record is whole or absent, and says nothing of the run's state; that is for locks and ledgers to say. Never: decide
anything.
"""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from storage.files import make_directory
from storage.runs import RunPaths, durable_write

WORK_FOLDER = "_flow_runs"
"""Beside the runs, under `runs_root`."""
_KEPT_S = 30 * 86_400.0
"""Seconds for which a record is kept: as long as Prefect keeps the flow run."""

Process = Literal["alive", "stopped", "gone", "elsewhere"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A process that works, or worked, at a run."""

    flow_run: str
    """Its flow run's id."""
    run: str
    """Name of the run, its folder under `runs_root`."""
    machine: str
    pid: int
    began: float
    """When the process began, seconds of 1970, as its system tells it: numbers are given out again."""

    def process(self) -> Process:
        """What became of it; `elsewhere` if that cannot be seen from here."""
        if self.machine != machine():
            return "elsewhere"
        try:
            found = psutil.Process(self.pid)
            if abs(found.create_time() - self.began) > 0.1 or found.status() == psutil.STATUS_ZOMBIE:
                return "gone"
            return "stopped" if found.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "alive"
        except psutil.NoSuchProcess:
            return "gone"


def machine() -> str:
    """This host since it was booted, and its space of process numbers: what a process number means something in."""
    try:
        boot, numbers = Path("/proc/sys/kernel/random/boot_id").read_text()[:8], os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()} {boot} {numbers}"


def record_work(paths: RunPaths, flow_run: str) -> None:
    """Write down that this process works at the run for that flow run; records that nobody will ask for go."""
    folder = paths.root.parent / WORK_FOLDER
    make_directory(folder)
    mine = Work(
        flow_run=flow_run,
        run=paths.root.name,
        machine=machine(),
        pid=os.getpid(),
        began=psutil.Process().create_time(),
    )
    durable_write(folder / f"{flow_run}.json", json.dumps(asdict(mine)).encode())
    for file in folder.glob("[0-9a-f]*.json"):
        if file.stat().st_mtime < time.time() - _KEPT_S:
            file.unlink(missing_ok=True)


def read_work(runs_root: Path, flow_run: str) -> Work | None:
    """Who worked for that flow run; None if it was killed before it could say so."""
    return _read(runs_root / WORK_FOLDER / f"{flow_run}.json")


def list_works(paths: RunPaths) -> list[Work]:
    """All that worked at this run, the latest first."""
    files = (paths.root.parent / WORK_FOLDER).glob("[0-9a-f]*.json")
    found = [work for file in files if (work := _read(file)) is not None and work.run == paths.root.name]
    return sorted(found, key=lambda work: work.began, reverse=True)


def _read(file: Path) -> Work | None:
    try:
        return Work(**json.loads(file.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):  # another version's, or nobody's
        return None
