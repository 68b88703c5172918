"""Which version the engines play while a step trains, and where a run goes on."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import rollout_queue
from pipeline.publisher import Publisher
from pipeline.rollout_queue import RolloutQueue
from records.policy_version import BASE, PolicyVersion
from storage.runs import RunPaths
from training.messages import ResumePoint, TrainedStep


class Engines:
    """Resources and queue in one: what was served."""

    def __init__(self, step_done: int = 0) -> None:
        self.served: list[int] = []
        last = TrainedStep(published=step(step_done) if step_done else BASE, metrics={})
        self.resume_point = ResumePoint(last=last, set_aside=())
        self.paths = self.control = None

    async def serve(self, policy: PolicyVersion) -> None:
        await asyncio.sleep(0)
        assert policy.adapter == Path(f"v{policy.version}")
        self.served.append(policy.version)


def step(version: int) -> PolicyVersion:
    return PolicyVersion(version=version, adapter=Path(f"v{version}"), adapter_hash=f"hash-{version}")


def test_a_version_that_is_held_back_is_served_when_it_is_released_and_only_once():
    async def run(engines: Any) -> None:
        publisher = Publisher(engines)
        publisher.hold(step(1))
        await asyncio.sleep(0)
        assert engines.served == []
        await publisher.release()
        await publisher.release()
        assert engines.served == [1]

    asyncio.run(run(Engines()))


def test_a_run_that_fails_serves_nothing_more():
    async def run(engines: Any) -> None:
        publisher = Publisher(engines)
        publisher.hold(step(1))
        await publisher.close(failed=True)
        assert engines.served == []

    asyncio.run(run(Engines()))


def queue(engines: Any, depth: int) -> RolloutQueue:
    engines.rollouts = SimpleNamespace(start_groups=2)
    engines.paths = RunPaths(Path("/nonexistent"))
    return RolloutQueue(engines, engines, depth, 9)


async def resumed(engines: Any, depth: int) -> list[int]:
    """What the engines serve once a queue has opened; then the queue closes, as at the end of a run."""
    async with queue(engines, depth):
        return list(engines.served)


@pytest.mark.parametrize(
    ("step_done", "depth", "at_first", "at_the_end"),
    [(0, 1, [], []), (1, 1, [], [1]), (5, 1, [4], [4, 5]), (1, 0, [1], [1]), (5, 0, [5], [5]), (5, 2, [5], [5])],
)
def test_a_run_goes_on_with_the_version_that_it_would_have_played(
    monkeypatch: pytest.MonkeyPatch, step_done: int, depth: int, at_first: list[int], at_the_end: list[int]
):
    monkeypatch.setattr(rollout_queue, "read_adapter", lambda paths, version: adapter(version))
    engines: Any = Engines(step_done)
    assert asyncio.run(resumed(engines, depth)) == at_first
    assert engines.served == at_the_end


def adapter(version: int) -> Any:
    return step(version)
