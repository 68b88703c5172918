"""A command whose Prefect server cannot write, because the disk of its database is full, says so in time and ends."""

import asyncio
import logging
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from entente.cli import run_flow
from entente.telemetry.errors import DiskFullError, TrainingError

FULL = DiskFullError("no space is left on the disk of Prefect's database 'prefect.db': make room")


class Disk:
    """A disk that is full at some looks; each look is 20 s after the one before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *full: bool) -> None:
        self._full, self.now = [*full], 0.0
        monkeypatch.setattr(run_flow, "check_room", self.look)
        monkeypatch.setattr(run_flow, "LOOKS_EVERY_S", 0.01)
        monkeypatch.setattr(run_flow, "time", SimpleNamespace(monotonic=lambda: self.now))
        for surroundings in ("prefect_server", "show_progress"):
            monkeypatch.setattr(run_flow, surroundings, nullcontext)

    def look(self) -> None:
        self.now += 20
        if self._full.pop(0) if len(self._full) > 1 else self._full[0]:
            raise FULL


def test_a_flow_that_cannot_end_on_a_full_disk_is_ended_and_the_disk_is_named(monkeypatch: pytest.MonkeyPatch, said: list[str]):
    disk, closed = Disk(monkeypatch, False, True), []

    async def waits() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            closed.append(disk.now)

    with pytest.raises(DiskFullError, match="Prefect's database"):
        run_flow.run_flow(waits)
    assert closed == [100.0], "full at 40 s, and for 60 s"
    assert len(said) == 1 and "make room within 60 s" in said[0]


def test_a_flow_that_does_not_end_is_left_behind_in_silence(monkeypatch: pytest.MonkeyPatch, said: list[str]):
    """Prefect's client asks a server that cannot write again and again, also when it is cancelled."""
    Disk(monkeypatch, True)
    monkeypatch.setattr(run_flow, "FULL_FOR_S", 0.1)
    monkeypatch.setattr(logging.getLogger("prefect.flow_runs"), "disabled", False)
    released = threading.Event()

    async def stays() -> None:
        released.wait(60)

    with pytest.raises(DiskFullError):
        run_flow.run_flow(stays)
    assert logging.getLogger("prefect.flow_runs").disabled
    released.set()


def test_room_that_somebody_makes_lets_the_flow_go_on(monkeypatch: pytest.MonkeyPatch, said: list[str]):
    disk = Disk(monkeypatch, True, True, False, True, True, False)

    async def works() -> str:
        while disk.now < 200:
            await asyncio.sleep(0.01)
        return "done"

    assert run_flow.run_flow(works) == "done" and len(said) == 2, "it was full twice"


PREFECT_S, OURS = RuntimeError("Server error '500 Internal Server Error'"), TrainingError("the trainer refused a batch")


@pytest.mark.parametrize(
    ("full", "error", "raised"),
    [(True, PREFECT_S, DiskFullError), (False, PREFECT_S, RuntimeError), (True, OURS, TrainingError)],
    ids=["on a full disk", "with room", "an error of the run itself"],
)
def test_prefect_s_own_error_is_told_by_its_cause(monkeypatch: pytest.MonkeyPatch, full: bool, error: Exception, raised: Any):
    Disk(monkeypatch, full)

    async def fails() -> None:
        raise error

    with pytest.raises(raised):
        run_flow.run_flow(fails)
