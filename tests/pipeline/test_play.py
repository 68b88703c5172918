"""Rollouts begin with an empty prefix cache, and have the horizon of their step."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.play import RolloutReport, _after_forgetting, play_stretch
from rollouts.settings import RolloutSettings
from storage.runs import RunPaths
from telemetry.timing import Spans


class Keeping:
    """An engine that keeps prefixes."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def forget_prefixes(self) -> None:
        self.calls.append("forget")

    async def play(self) -> str:
        self.calls.append("play")
        return "rows"


def test_prefixes_are_forgotten_before_games_are_played():
    engine = Keeping()
    assert asyncio.run(_after_forgetting(engine, engine.play)) == "rows"  # type: ignore[arg-type]
    assert engine.calls == ["forget", "play"]
    assert asyncio.run(_after_forgetting(object(), engine.play)) == "rows"  # type: ignore[arg-type]


def test_the_horizon_of_start_groups_follows_from_their_step_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    played: list[int] = []

    async def play(*_: Any, rollouts: RolloutSettings, **__: Any) -> None:
        played.append(rollouts.horizon_years)

    nothing = RolloutReport(
        start_groups=2, decisions=0, failed_forks=0, orders_rejected=0, set_aside=0, seconds=0, engine_work=None, engine_ms=None
    )
    monkeypatch.setattr("pipeline.play.play_groups", play)
    monkeypatch.setattr("pipeline.play.start_positions", lambda resources, step: [("position", "FRANCE")] * 2)
    monkeypatch.setattr("pipeline.play.report_of", lambda *_: nothing)
    resources: Any = SimpleNamespace(
        paths=RunPaths(tmp_path),
        spans=Spans(),
        tokens=SimpleNamespace(thinking=None),
        rollouts=RolloutSettings(start_groups=2, horizon_years=1, horizon_schedule="3:2, 5:4"),
    )
    for step in (1, 2, 3, 4, 5, 9):
        asyncio.run(play_stretch(resources, step, 2 * (step - 1), 2))
    assert played == [1, 1, 2, 2, 4, 4]
