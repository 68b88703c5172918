"""Simulated rollouts are real shards at a set pace: those of another run, numbered anew, of the version then in force."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.resources import Resources
from pipeline.simulated_settings import SimulatedSettings
from records.generation import GenerationRequest
from records.policy_version import PolicyVersion
from rollouts.settings import RolloutSettings
from storage.asking import connect
from storage.stored_groups import stored_groups
from tasks.replayed_rollouts import IdleEngine, Pace, ReplayedSource, replay_groups
from tasks.rollouts import roll_out_groups
from telemetry.errors import EngineError
from tests.task_resources import resources_of

START_GROUPS = 2


def simulated(**settings: Any) -> SimulatedSettings:
    return SimulatedSettings(from_run="origin", **settings)


@pytest.fixture
def resources(tmp_path: Path, host, uniform_engine, tokens, positions) -> Callable[..., Resources]:
    """What tasks of a run of this name work with: `resources("run", engine)`."""
    rollouts = RolloutSettings(start_groups=START_GROUPS, forks_per_group=2, horizon_years=1)

    def make(name: str, engine: Any = None) -> Resources:
        return resources_of(tmp_path / name, positions, rollouts, host=host, engine=engine or uniform_engine(), tokens=tokens)

    return make


@pytest.fixture
def source(resources: Callable[..., Resources]) -> Callable[..., ReplayedSource]:
    """A source over two start groups that were really played: `source(rate=...)`."""
    origin = resources("origin")
    asyncio.run(roll_out_groups.fn(origin, 1, 0, START_GROUPS))
    groups = stored_groups(origin.paths, {"run": "origin"})
    return lambda **settings: ReplayedSource(resources("run", IdleEngine()), groups, simulated(**settings))


def rows(run: Path, what: str) -> list[tuple[Any, ...]]:
    with connect(run) as found:
        return found.sql(f"select {what} from decisions order by start_group, fork, ply, power").fetchall()


def test_what_is_published_is_what_was_played_under_new_numbers(source: Callable[..., ReplayedSource]):
    replayed = source(rate=1000)
    run, origin = replayed.resources.paths.root, replayed.resources.paths.root.with_name("origin")
    first = asyncio.run(replay_groups.fn(replayed, 4, 6, 2))
    again = asyncio.run(replay_groups.fn(replayed, 4, 6, 2))
    told = "fork, ply, power, n_completion, centres_gained, snapshot_id"
    assert rows(run, told) == rows(origin, told) and len(rows(run, told)) == first.decisions == again.decisions
    assert {row[0] for row in rows(run, "start_group")} == {6, 7}
    assert {row[0] for row in rows(run, "worker")} == {"simulated"}
    assert first.engine_work is None and again.engine_work is None, "no engine drew anything, which is not the same as 0 tokens"
    assert (first.start_groups, first.failed_forks, first.orders_rejected) == (2, 0, 0)


def test_rows_bear_the_version_that_was_in_force_as_their_start_group_began(source: Callable[..., ReplayedSource]):
    replayed = source(rate=4)
    engine: Any = replayed.resources.engine

    async def play() -> None:
        playing = asyncio.create_task(replay_groups.fn(replayed, 1, 0, 2))
        while replayed.pace._free_at < 0:  # the first start group begins with it, the second a quarter of a second later
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        await engine.publish(PolicyVersion(version=3, adapter=Path("v3"), adapter_hash="hash3"))
        await playing

    asyncio.run(play())
    versions = rows(replayed.resources.paths.root, "distinct start_group, policy_version, fork, ply, power")
    assert {(row[0], row[1]) for row in versions} == {(0, 0), (1, 3)}


def test_a_rate_is_kept_however_many_ask_at_once(source: Callable[..., ReplayedSource]):
    replayed = source(rate=20)

    async def play() -> float:
        began = time.monotonic()
        await asyncio.gather(*(replay_groups.fn(replayed, number + 1, 2 * number, 2) for number in range(3)))
        return time.monotonic() - began

    assert 6 / 20 <= asyncio.run(play()) < 6 / 20 + 10


def test_the_pace_is_that_of_one_engine_which_saves_nothing_up():
    pace = Pace(rate=2)
    assert [pace.next(now=10.0) for _ in range(3)] == [(10.0, 10.5), (10.5, 11.0), (11.0, 11.5)]
    assert pace.next(now=20.0) == (20.0, 20.5), "what nobody asked for was not played"


def test_nobody_draws_where_rollouts_are_simulated():
    request: Any = GenerationRequest.__new__(GenerationRequest)
    object.__setattr__(request, "request_id", "r1")
    with pytest.raises(EngineError, match="a run with simulated rollouts has no engine"):
        asyncio.run(IdleEngine().generate(request))
