"""Rollouts begin with an empty prefix cache."""

import asyncio

from pipeline.play import _after_forgetting


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
