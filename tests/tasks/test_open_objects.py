"""A version that is served retires what is too old to train on, at the engine."""

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

from entente.records.policy_version import BASE, PolicyVersion, TrainedStep
from entente.rollouts.settings import RolloutSettings
from state_cache.settings import CacheSettings
from state_cache.store import StateCache
from storage.runs import RunPaths
from tasks.open_objects import OpenRun


class Told:
    """Remembers what it was told to serve."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def publish(self, policy: PolicyVersion) -> None:
        self.calls.append(("publish", policy.version, policy.adapter_hash))

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
        provenance={}, max_policy_lag=2,
    )  # fmt: skip
    asyncio.run(resources.serve(PolicyVersion(version=7, adapter=tmp_path, adapter_hash="hash")))
    assert engine.calls == [("publish", 7, "hash"), ("retire", 5)]
