"""What a run's scores are measured on."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evaluation.strength import Score
from flows import score_policy as scores
from pipeline.run_settings import layered_settings
from state_cache.settings import CacheSettings
from state_cache.store import StateCache
from storage.runs import RunPaths


@pytest.mark.parametrize(
    "who", [lambda *given: scores.score_policy(*given, "base"), scores.score_scripted], ids=["policy", "scripted"]
)
def test_a_version_is_scored_on_held_out_positions_alone(tmp_path: Path, positions, monkeypatch: pytest.MonkeyPatch, who: Any):
    measured = []

    async def measure(label: str, player: str, opponents: str, played_on: Any, *others: Any) -> Score:
        measured.append(tuple(played_on))
        return Score(mean=0.0, low=None, high=None, forks=1, positions=1, source_games=1, orders_rejected=0)

    monkeypatch.setattr(scores, "evaluate_player", measure)
    cache = StateCache(path=tmp_path, settings=CacheSettings(), train=tuple(positions[:5]), held_out=tuple(positions[5:]))
    resources: Any = SimpleNamespace(cache=cache, paths=RunPaths(tmp_path).create(), host=None, engine=None, tokens=None)
    found = asyncio.run(who(resources, layered_settings("laptop")))
    assert found and measured == [cache.held_out] * len(found)
