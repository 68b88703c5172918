"""Rollouts begin with empty prefix caches, those of past versions too, and have the horizon of their step."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entente.reports.run_facts import RowCounter
from entente.rollouts.groups import GroupRange, _roll_out, play_groups
from entente.rollouts.settings import RolloutSettings
from entente.telemetry.timing import Spans
from storage.runs import RunPaths
from tests.task_resources import resources_of


class Keeping:
    """An engine that keeps prefixes."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def forget_prefixes(self) -> None:
        self.calls.append("forget")


@asynccontextmanager
async def served(versions: Collection[int]) -> AsyncIterator[dict[str, Any]]:
    yield {f"policy:{version}": None for version in versions}


def test_prefixes_are_forgotten_before_games_are_played(monkeypatch: pytest.MonkeyPatch):
    engine = Keeping()
    endpoints = SimpleNamespace(deciders={"openai:m@http://host/v1": None})
    resources: Any = SimpleNamespace(engine=engine, tokens=None, past=SimpleNamespace(served=served), endpoints=endpoints, seed=0)

    async def play(_: Any, players: Mapping[str, Any], *__: Any, **___: Any) -> str:
        engine.calls.append(f"play with {sorted(players)}")
        return "rows"

    monkeypatch.setattr("entente.rollouts.groups.roll_out", play)
    assert asyncio.run(_roll_out(resources, [], RolloutSettings(opponents="v0"), "x", lambda number: None)) == "rows"
    assert engine.calls == ["forget", "play with ['openai:m@http://host/v1', 'policy', 'policy:0']"]


def test_the_horizon_of_start_groups_follows_from_their_step_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    played: list[int] = []

    async def play(*given: Any) -> None:
        played.append(given[5].horizon_years)

    monkeypatch.setattr("entente.rollouts.groups._play_groups", play)
    monkeypatch.setattr("entente.rollouts.groups.sample_start_positions", lambda *_, **__: [("position", "FRANCE")] * 2)
    resources: Any = SimpleNamespace(
        paths=RunPaths(tmp_path),
        spans=Spans(),
        tokens=SimpleNamespace(thinking=None),
        seed=5,
        cache=SimpleNamespace(train=()),
        rollouts=RolloutSettings(start_groups=2, horizon_years=1, horizon_schedule="3:2, 5:4"),
    )
    for step in (1, 2, 3, 4, 5, 9):
        asyncio.run(play_groups(resources, GroupRange(2 * (step - 1), 2, step)))
    assert played == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("phase_index", [0, 1])
def test_a_failed_fork_is_counted_whether_or_not_it_has_rows(
    tmp_path: Path, host, uniform_engine, tokens, positions, phase_index: int
):
    engine = uniform_engine(fails=lambda request: request.request_id.startswith(f"local/5/1/2/{phase_index}/"))
    rollouts = RolloutSettings(start_groups=2, forks_per_group=4, horizon_years=1)
    resources = resources_of(tmp_path / "run", positions, rollouts, host=host, engine=engine, tokens=tokens)
    assert asyncio.run(play_groups(resources, GroupRange(0, 2, step=1)))["failed"] == 1
    again = asyncio.run(play_groups(resources, GroupRange(0, 2, step=1)))
    assert again["failed"] == 1, "a retry that plays nothing reads it from the shard"
    ((reason, forks),) = RowCounter(resources.paths, {}).read().failures
    assert forks == 1 and f"request local/5/1/2/{phase_index}/" in reason
