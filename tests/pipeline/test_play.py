"""Rollouts begin with empty prefix caches, those of past versions too."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from pipeline.play import _roll_out


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
    resources: Any = SimpleNamespace(engine=engine, past=SimpleNamespace(engine=other, served=served))
    assert asyncio.run(_roll_out(resources, engine.play, [3])) == "rows"  # type: ignore[arg-type]
    assert engine.calls == ["forget", "play against ['policy:3']"] and other.calls == ["forget"]
    resources.engine = resources.past.engine = object()
    assert asyncio.run(_roll_out(resources, engine.play, [])) == "rows"  # type: ignore[arg-type]
