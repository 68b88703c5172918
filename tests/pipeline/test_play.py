"""Rollouts begin with empty prefix caches, those of past versions too, and have the horizon of their step."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.play import RolloutReport, _roll_out, play_stretch
from rollouts.settings import RolloutSettings
from storage.runs import RunPaths
from telemetry.timing import Spans


class Keeping:
    """An engine that keeps prefixes."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def forget_prefixes(self) -> None:
        self.calls.append("forget")

    async def play(self, deciders: Mapping[str, Any]) -> str:
        self.calls.append(f"play against {sorted(deciders)}")
        return "rows"


@asynccontextmanager
async def served(versions: Collection[int]) -> AsyncIterator[dict[str, Any]]:
    yield {f"policy:{version}": None for version in versions}


def test_prefixes_are_forgotten_before_games_are_played():
    engine, other = Keeping(), Keeping()
    past = SimpleNamespace(engine=other, served=served)
    endpoints = SimpleNamespace(deciders={"openai:m@http://host/v1": None})
    resources: Any = SimpleNamespace(engine=engine, tokens=None, past=past, endpoints=endpoints)
    assert asyncio.run(_roll_out(resources, engine.play, RolloutSettings(opponents="v3"))) == "rows"
    assert engine.calls == ["forget", "play against ['openai:m@http://host/v1', 'policy:3']"] and other.calls == ["forget"]
    resources.engine = resources.past.engine = object()
    assert asyncio.run(_roll_out(resources, engine.play, RolloutSettings())) == "rows"


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
