"""Records which process works on which run for which flow run: one small file per flow run, next to the runs.

The flow names an unnamed run itself, and a killed flow run cannot report it, so the flow writes a record before training,
where other hosts can read it. A record is complete or absent. The run's state is in its locks and ledgers.
"""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from entente.telemetry.child import boot_id, find_process, process_start
from storage.files import durable_write, entries_in, make_directory
from storage.runs import RunPaths, last_change

WORK_FOLDER = "_flow_runs"
_KEPT_S = 30 * 86_400.0
"""Seconds after the last change of its run until a record is removed, as long as Prefect keeps the flow run."""

Process = Literal["alive", "stopped", "gone", "elsewhere"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowRunRecord:
    flow_run: str
    run: str
    machine: str
    pid: int
    began: str
    """See `process_start`; distinguishes processes with the same pid."""

    def process(self) -> Process:
        """State of the process; "elsewhere" if it is on another machine."""
        if self.machine != machine():
            return "elsewhere"
        try:
            if (process := find_process(self.pid, self.began)) is None:
                return "gone"
            return "stopped" if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "alive"
        except psutil.NoSuchProcess:
            return "gone"


def record_work(paths: RunPaths, flow_run: str) -> None:
    """Record that this process works on the run for `flow_run`, and remove old records."""
    folder = paths.root.parent / WORK_FOLDER
    make_directory(folder)
    mine = FlowRunRecord(
        flow_run=flow_run,
        run=paths.root.name,
        machine=machine(),
        pid=os.getpid(),
        began=process_start(os.getpid()),
    )
    durable_write(folder / f"{flow_run}.json", json.dumps(asdict(mine)).encode())
    for entry in entries_in(folder):
        if entry.path.match("[0-9a-f]*.json") and max(entry.touched(), _run_changed(entry.path)) < time.time() - _KEPT_S:
            entry.path.unlink(missing_ok=True)


def _run_changed(record: Path) -> float:
    runs_root = record.parent.parent
    work = read_work(runs_root, record.stem)
    return last_change(RunPaths(runs_root / work.run)) if work else 0.0


def read_work(runs_root: Path, flow_run: str) -> FlowRunRecord | None:
    """The record of `flow_run`; None if it was killed before it wrote one."""
    try:
        return FlowRunRecord(**json.loads((runs_root / WORK_FOLDER / f"{flow_run}.json").read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):  # absent, or written by another release
        return None


def machine() -> str:
    """Identifies where a pid is valid: host name, boot and pid namespace."""
    try:
        numbers = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()} {boot_id()[:8]} {numbers}"
