"""Which version the engines play while a step trains, and where a run goes on."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import publisher
from pipeline.publisher import Publisher, serve_where_it_stands
from telemetry import progress
from telemetry.errors import DataError
from training.process import TrainedStep


class Engines:
    """Resources and queue in one: what was served, and what the queue was told."""

    def __init__(self, step_done: int = 0) -> None:
        self.served: list[int] = []
        self.told: list[int] = []
        adapter = Path(f"v{step_done}") if step_done else None
        self.standing = SimpleNamespace(step_done=step_done, adapter=adapter, adapter_hash="", metrics={})
        self.paths = None

    async def serve(self, version: int, adapter: Path, adapter_hash: str) -> None:
        await asyncio.sleep(0)
        assert adapter == Path(f"v{version}")
        self.served.append(version)

    def published(self, version: int) -> None:
        self.told.append(version)


def step(version: int) -> TrainedStep:
    return TrainedStep(version=version, adapter=Path(f"v{version}"), adapter_hash="", metrics={})


def test_a_version_that_is_held_back_is_served_when_it_is_released_and_only_once():
    async def run(engines: Any) -> None:
        async with Publisher(engines, engines) as held:
            held.hold(step(1))
            await asyncio.sleep(0)
            assert engines.served == []
            await held.release()
            await held.release()
            assert engines.served == engines.told == [1]

    asyncio.run(run(Engines()))


def test_scores_are_played_by_a_version_that_was_held_back_to_the_end():
    async def run(engines: Any) -> None:
        async with Publisher(engines, engines, step(6)) as held:
            held.hold(step(7))
        assert engines.served == [7]

    asyncio.run(run(Engines()))


def test_a_run_that_fails_serves_nothing_more():
    async def run(engines: Any) -> None:
        with pytest.raises(RuntimeError):
            async with Publisher(engines, engines) as held:
                held.hold(step(1))
                raise RuntimeError
        assert engines.served == []

    asyncio.run(run(Engines()))


@pytest.mark.parametrize(
    ("step_done", "one_behind", "served", "held"),
    [(0, True, [], None), (1, True, [], 1), (5, True, [4], 5), (1, False, [1], None), (5, False, [5], None)],
)
def test_a_run_goes_on_with_the_version_that_it_would_have_played(
    monkeypatch: pytest.MonkeyPatch, step_done: int, one_behind: bool, served: list[int], held: int | None
):
    monkeypatch.setattr(publisher, "read_adapter", lambda paths, version: adapter(version))
    engines: Any = Engines(step_done)
    newest = asyncio.run(serve_where_it_stands(engines, one_behind=one_behind))
    assert engines.served == served and (newest and newest.version) == held


def test_where_the_version_before_is_gone_the_newest_plays_and_that_is_said(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(progress, "_reporter", SimpleNamespace(say=said.append))

    def gone(paths: Any, version: int) -> Any:
        raise DataError(f"Policy version {version} is not published")

    monkeypatch.setattr(publisher, "read_adapter", gone)
    engines: Any = Engines(5)
    assert asyncio.run(serve_where_it_stands(engines, one_behind=True)) is None
    assert engines.served == [5]
    assert len(said) == 1 and "rollouts of step 6 are of version 5" in said[0]


def adapter(version: int) -> Any:
    return SimpleNamespace(version=version, path=Path(f"v{version}"), adapter_hash="")
