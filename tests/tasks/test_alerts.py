"""A run's alerts on their way: said, kept, sent to Prefect, and never in the way of the run."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from storage.runs import RunPaths, last_change
from tasks import alerts
from tasks.alerts import AlertDesk
from tests.waiting import run_in_virtual_time

FIGURES = {"train/entropy": 0.5}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The events that were sent; every entropy of the tests is below the floor but one of 2 nats."""
    monkeypatch.setattr("entente.telemetry.alerts.ENTROPY_FLOOR", 1.0)
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(alerts, "emit_event", lambda **event: found.append(event))
    return found


def test_an_alert_reaches_log_file_and_prefect_and_one_that_gets_lost_is_said(
    tmp_path: Path, said: list[str], events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    paths = RunPaths(tmp_path / "mine").create()

    async def run() -> None:
        async with AlertDesk(paths, max_policy_lag=2) as desk:
            for step in (1, 2, 3):
                desk.step(step, FIGURES)

    asyncio.run(run())
    (line,) = paths.alerts.read_text().splitlines()
    told = json.loads(line)
    assert (told["name"], told["run"], told["step"]) == ("entropy", "mine", 1)
    assert said == [f"alert (entropy): {told['sentence']}"]
    (event,) = events
    assert event["event"] == "entente.alert.entropy" and event["resource"]["prefect.resource.id"] == "entente.run.mine"
    assert event["payload"] == {"step": 1, "sentence": told["sentence"]}
    monkeypatch.setattr(alerts, "emit_event", lambda **event: 1 / 0)
    asyncio.run(run())
    assert said[-1] == "an alert could not be delivered (ZeroDivisionError: division by zero); the run continues"


def test_a_quiet_run_is_said_to_be_stalled(tmp_path: Path, said: list[str], events: list[dict[str, Any]]):
    async def run() -> None:
        async with AlertDesk(RunPaths(tmp_path / "mine").create(), max_policy_lag=2, done=7):
            await asyncio.sleep(30 * 60)
            assert not events
            await asyncio.sleep(2 * alerts.BEAT_S)

    run_in_virtual_time(run(), alerts)
    assert [event["event"] for event in events] == ["entente.alert.stalled"]
    assert events[0]["payload"]["step"] == 7 and "mine, step 7: no step was finished" in events[0]["payload"]["sentence"]


def test_a_resumed_run_judges_its_progress_with_the_steps_before(
    tmp_path: Path, said: list[str], events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    """A run that is interrupted every night has never done twice 100 steps in one process."""
    monkeypatch.setattr("entente.telemetry.alerts.NO_PROGRESS_STEPS", 4)
    paths = RunPaths(tmp_path / "mine").create()
    paths.metrics.write_text("".join(json.dumps({"step": step, "train/reward": 0.1}) + "\n" for step in range(8)))

    AlertDesk(paths, max_policy_lag=2, done=7).step(8, {"train/reward": 0.1})
    assert [event["event"] for event in events] == ["entente.alert.no_progress"]


def test_the_sleep_of_a_machine_is_no_hang(tmp_path: Path, said: list[str]):
    """After a night without a file, recovery killed a run that was well, if it looked before the run's next file."""
    paths = RunPaths(tmp_path / "mine").create()
    paths.settings.write_text("{}")

    async def run() -> None:
        async with AlertDesk(paths, max_policy_lag=2):
            for place in (paths.root, *paths.root.iterdir()):
                os.utime(place, (1.0, 1.0))
            await asyncio.sleep(20 * 60)
            assert last_change(paths) == 1.0, "a hang that is none of a machine leaves no sign of life"
            clock = alerts.time.monotonic
            alerts.time.time = lambda: clock() + 8 * 3600
            await asyncio.sleep(2 * alerts.BEAT_S)

    run_in_virtual_time(run(), alerts)
    assert last_change(paths) > 1.0 and not said
