"""A version that is served retires what is too old to train on, at the engine."""

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from entente.records.policy_version import BASE, PolicyVersion, TrainedStep
from entente.rollouts.settings import RolloutSettings
from entente.telemetry.errors import EngineError
from state_cache.settings import CacheSettings
from state_cache.store import StateCache
from storage.runs import RunPaths
from tasks.open_objects import OpenRun
from tests.task_resources import resources_of


class Told:
    """Remembers what it was told to serve."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def publish(self, policy: PolicyVersion) -> None:
        self.calls.append(("publish", policy.version, policy.adapter_hash))

    async def use_threads(self, count: int) -> None:
        self.calls.append(("threads", count))

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        self.calls.append(("retire", oldest, *keep))


def test_serving_a_version_retires_those_beyond_the_staleness_budget(tmp_path: Path, host):
    nothing: Any = None
    engine: Any = Told()
    resources = OpenRun(
        paths=RunPaths(tmp_path), model=tmp_path, seed=0, rollouts=RolloutSettings(),
        cache=StateCache(path=tmp_path, settings=CacheSettings(), train=(), held_out=()),
        host=host, engine=engine, tokens=nothing, trainer=nothing,
        resume_point=TrainedStep(published=BASE, metrics={}),
        provenance={}, max_policy_lag=2, engine_threads=(1, 2),
    )  # fmt: skip
    asyncio.run(resources.serve(PolicyVersion(version=7, adapter=tmp_path, adapter_hash="hash")))
    assert engine.calls == [("publish", 7, "hash"), ("retire", 5)]


def test_an_engine_that_computes_alone_has_all_cores_until_the_trainer_works_again(tmp_path: Path, host):
    engine: Any = Told()
    resources = resources_of(tmp_path / "run", [], RolloutSettings(), host=host, engine=engine, engine_threads=(1, 2))

    async def fail_alone() -> None:
        async with resources.engine_alone():
            engine.calls.append("alone")
            raise EngineError("lost")

    with pytest.raises(EngineError, match="lost"):
        asyncio.run(fail_alone())
    assert engine.calls == [("threads", 2), "alone", ("threads", 1)]
