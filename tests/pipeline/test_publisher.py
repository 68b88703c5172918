"""Which version the engines play while a step trains, and where a run goes on."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import lockstep_queue
from pipeline.buffered_queue import BufferedQueue
from pipeline.lockstep_queue import LockstepQueue
from pipeline.publisher import Publisher
from pipeline.rollout_queue import RolloutQueue
from pipeline.run_settings import PipelineSettings
from records.policy_version import BASE, PolicyVersion
from storage.runs import RunPaths
from training.messages import ResumePoint, TrainedStep


class Engines:
    """Resources and queue in one: what was served, and what the queue was told."""

    def __init__(self, step_done: int = 0) -> None:
        self.served: list[int] = []
        self.heard: list[int] = []
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
        publisher = Publisher(engines, engines.heard.append)
        publisher.hold(step(1))
        await asyncio.sleep(0)
        assert engines.served == []
        await publisher.release()
        await publisher.release()
        assert engines.served == engines.heard == [1]

    asyncio.run(run(Engines()))


def test_a_run_that_fails_serves_nothing_more():
    async def run(engines: Any) -> None:
        publisher = Publisher(engines, engines.heard.append)
        publisher.hold(step(1))
        await publisher.close(failed=True)
        assert engines.served == []

    asyncio.run(run(Engines()))


def queue(engines: Any, *, overlapped: bool) -> RolloutQueue:
    engines.rollouts, engines.max_policy_lag = SimpleNamespace(start_groups=2), 2
    engines.paths = RunPaths(Path("/nonexistent"))
    if overlapped:
        return LockstepQueue(engines, engines, PipelineSettings(deterministic=True, buffer_depth=1), 9)
    return BufferedQueue(engines, engines, PipelineSettings(buffer_depth=0), 9)


async def resumed(engines: Any, *, overlapped: bool) -> list[int]:
    """What the engines serve once a queue has opened; then the queue closes, as at the end of a run."""
    async with queue(engines, overlapped=overlapped):
        return list(engines.served)


@pytest.mark.parametrize(
    ("step_done", "overlapped", "at_first", "at_the_end"),
    [(0, True, [], []), (1, True, [], [1]), (5, True, [4], [4, 5]), (1, False, [1], [1]), (5, False, [5], [5])],
)
def test_a_run_goes_on_with_the_version_that_it_would_have_played(
    monkeypatch: pytest.MonkeyPatch, step_done: int, overlapped: bool, at_first: list[int], at_the_end: list[int]
):
    monkeypatch.setattr(lockstep_queue, "read_adapter", lambda paths, version: adapter(version))
    engines: Any = Engines(step_done)
    assert asyncio.run(resumed(engines, overlapped=overlapped)) == at_first
    assert engines.served == at_the_end


def adapter(version: int) -> Any:
    return step(version)
