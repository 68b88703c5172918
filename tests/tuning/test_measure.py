"""Claims about a pass: how many requests are in flight, when they arrive, and in which order the arms come."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from records.generation import Generation, GenerationRequest
from records.policy_version import PolicyVersion
from tuning.measure import Gaps, both_arms, one_pass
from tuning.requests import chain_table

REQUESTS = [
    GenerationRequest(request_id=f"r{n}", prompt_ids=[1, n], table=chain_table([4, 5, 2], [0, 2, 3], 2), seed=n)
    for n in range(24)
]


@pytest.fixture
def engine(uniform_engine: Callable[..., Any]) -> Any:
    """One that takes five milliseconds, and counts who is with it and under which version they ask."""

    class Busy(uniform_engine):  # type: ignore[misc, valid-type]
        most = now = 0

        def __init__(self) -> None:
            super().__init__()
            self.asked: list[tuple[str, int | None, float]] = []

        async def generate(self, request: GenerationRequest) -> Generation:
            self.asked.append((request.request_id, request.version, time.monotonic()))
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.005)
            self.now -= 1
            return await super().generate(request)

    return Busy()


def test_as_many_requests_are_in_flight_as_was_said_and_all_are_timed(engine: Any):
    found = asyncio.run(one_pass(engine, REQUESTS, Gaps(), label="a", version=1, concurrency=5))
    assert engine.most == 5 and len(found.e2el_ms) == len(found.ttft_ms) == 24 and min(found.e2el_ms) >= 5
    assert found.completion_tokens == 48 and found.prompt_tokens == 48 and found.seconds >= 24 / 5 * 0.005
    assert {version for _, version, _ in engine.asked} == {1}


def test_requests_arrive_at_the_rate_whether_others_are_done_or_not_and_alike_each_time(engine: Any):
    first = asyncio.run(one_pass(engine, REQUESTS, Gaps(), label="a", version=0, request_rate=200.0, seed=7))
    assert 0.03 < first.seconds < 5 and engine.most < 24
    moments = [moment for _, _, moment in engine.asked]
    assert moments[-1] - moments[0] > 0.03, "they came at once"


@pytest.mark.parametrize(
    ("interleaved", "order"), [(True, ["off", "on", "on", "off"]), (False, ["off", "off", "on", "on"])], ids=["slots", "merged"]
)
def test_arms_come_in_turn_where_both_are_served_and_the_adapter_is_published_once(
    engine: Any, interleaved: bool, order: list[str]
):
    published: list[int] = []

    async def publish() -> None:
        published.append(len(engine.asked))
        await engine.publish(PolicyVersion(version=1, adapter=Path(), adapter_hash=""))

    seen: list[str] = []
    load = {"concurrency": 8, "request_rate": 0.0, "seed": 0}
    work = both_arms(
        engine, REQUESTS, publish, interleaved=interleaved, rounds=2, load=load, on_pass=lambda arm, done: seen.append(arm)
    )
    found = asyncio.run(work)
    assert seen == order and len(published) == 1 and {name: len(passes) for name, passes in found.items()} == {"off": 2, "on": 2}
    versions = {name.split("/")[0]: version for name, version, _ in engine.asked if not name.startswith("warm-up")}
    assert versions == {"off": 0, "on": 1}
    if not interleaved:
        assert all(version == 0 for _, version, _ in engine.asked[: published[0]]), "merged weights replace the base"
