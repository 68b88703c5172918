"""A run's alerts on their way: said, kept, sent to Prefect and to hooks, and never in the way of the run."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from storage.runs import RunPaths
from tasks import alerts
from tasks.alerts import AlertDesk
from telemetry.alerts import AlertSettings
from tests.waiting import run_in_virtual_time

FIGURES = {"train/entropy": 0.5}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The events that were sent; every entropy of the tests is below the floor but one of 2 nats."""
    monkeypatch.setattr("telemetry.alerts.ENTROPY_FLOOR", 1.0)
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(alerts, "emit_event", lambda **event: found.append(event))
    return found


def told_by(root: Path, command: str) -> AlertSettings:
    """Settings with an alert file that holds this command."""
    (root / "_alerts").mkdir()
    (root / "_alerts" / "mine.toml").write_text(f'command = "{command}"')
    return AlertSettings(file="mine")


def test_an_alert_reaches_log_file_prefect_and_hook_and_a_slow_hook_delays_no_step(
    tmp_path: Path, said: list[str], events: list[dict[str, Any]]
):
    paths = RunPaths(tmp_path / "mine").create()
    settings = told_by(tmp_path, f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; cat > {tmp_path}/told")

    async def run() -> None:
        async with AlertDesk(paths, settings, max_policy_lag=2) as desk:
            for step in (1, 2, 3):
                desk.step(step, FIGURES)
            (tmp_path / "go").touch()  # a step that waited for the hook would never come here

    asyncio.run(run())
    (line,) = paths.alerts.read_text().splitlines()
    told = json.loads(line)
    assert told == json.loads((tmp_path / "told").read_text()), "the block ends when hooks have ended"
    assert (told["name"], told["run"], told["step"]) == ("entropy", "mine", 1)
    assert said == [f"alert (entropy): {told['sentence']}"]
    (event,) = events
    assert event["event"] == "entente.alert.entropy" and event["resource"]["prefect.resource.id"] == "entente.run.mine"
    assert event["payload"] == {"step": 1, "sentence": told["sentence"]}


def test_a_hook_that_fails_is_said_once_and_an_alert_that_gets_lost_too(
    tmp_path: Path, said: list[str], events: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    paths = RunPaths(tmp_path / "mine").create()
    settings = told_by(tmp_path, "exit 3")

    async def run(low: tuple[int, ...]) -> None:
        async with AlertDesk(paths, settings, max_policy_lag=2) as desk:
            for step in range(1, 6):
                desk.step(step, FIGURES if step in low else {"train/entropy": 2.0})

    asyncio.run(run((1, 3, 5)))
    assert len([each for each in said if each.startswith("alert (entropy)")]) == 3
    assert [each for each in said if "command" in each] == ["the command ended with 3: it said nothing; the run continues"]
    said.clear()
    monkeypatch.setattr(alerts, "emit_event", lambda **event: 1 / 0)
    asyncio.run(run((1,)))
    assert "an alert could not be delivered (ZeroDivisionError: division by zero); the run continues" in said


def test_a_quiet_run_is_said_to_be_stalled(tmp_path: Path, said: list[str], events: list[dict[str, Any]]):
    async def run() -> None:
        settings = AlertSettings()
        async with AlertDesk(RunPaths(tmp_path / "mine").create(), settings, max_policy_lag=2):
            await asyncio.sleep(30 * 60)
            assert not events
            await asyncio.sleep(2 * alerts.BEAT_S)

    run_in_virtual_time(run(), alerts)
    assert [event["event"] for event in events] == ["entente.alert.stalled"]
