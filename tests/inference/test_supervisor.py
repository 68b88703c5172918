"""An engine that dies is built again, once, with what it served; its requests never notice, and hopeless ones are given up."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from entente.inference.supervisor import EngineSupervisor
from entente.records.policy_version import BASE, PolicyVersion
from entente.records.rows import GenerationRequest
from entente.telemetry.errors import DataError, EngineLostError
from tests.inference.plain_engine import PlainEngine, expected_tokens
from tests.inference.test_vllm_client import request_for

__all__ = ["request_for"]  # a fixture
DEATH = EngineLostError("struck by the test")
NOWHERE = Path("nowhere")


class Factory:
    """Builds plain engines and keeps them; `fate` may spoil each."""

    def __init__(self, fate: Callable[[PlainEngine, int], None] = lambda engine, number: None) -> None:
        self.built: list[PlainEngine] = []
        self._fate = fate

    def __call__(self) -> PlainEngine:
        engine = PlainEngine(delay_s=0.02)
        self._fate(engine, len(self.built))
        self.built.append(engine)
        return engine


async def started(factory: Factory, restarts: int = 3) -> EngineSupervisor:
    supervisor = EngineSupervisor(factory, restarts=restarts)
    await supervisor.start()
    return supervisor


def test_requests_in_flight_at_a_death_are_drawn_by_one_new_engine_under_their_versions(request_for):
    async def scene() -> None:
        factory = Factory()
        supervisor = await started(factory)
        for version in (4, 5, 6):
            await supervisor.publish(PolicyVersion(version=version, adapter=NOWHERE, adapter_hash=f"hash-{version}"))
        await supervisor.retire(5)
        asked = [(request_for(number, version=version), version or 6) for number, version in enumerate([None, 5, 6] * 7)]
        drawing = asyncio.gather(*(supervisor.generate(request) for request, _ in asked))
        await asyncio.sleep(0.01)
        factory.built[0].dies = DEATH
        for (request, version), answer in zip(asked, await drawing, strict=True):
            assert (answer.policy.version, answer.policy.adapter_hash) == (version, f"hash-{version}")
            assert answer.token_ids.tolist() == expected_tokens(request, version)
        assert len(factory.built) == 2 and supervisor.restarts == 1 and supervisor.ready
        assert factory.built[1].served.keys() == {0, 5, 6}, "what was retired must not come back"
        assert (await supervisor.stats()).requests == 2 * 21

    asyncio.run(scene())


def test_an_engine_that_dies_in_vain_is_given_up_after_the_bound(request_for):
    async def scene() -> None:
        def stillborn(engine: PlainEngine, number: int) -> None:
            engine.dies = DEATH

        factory = Factory(stillborn)
        supervisor = await started(factory, restarts=2)
        with pytest.raises(EngineLostError, match="in flight each time"):
            await asyncio.gather(*(supervisor.generate(request_for(number)) for number in range(5)))
        for number in (7, 8):
            with pytest.raises(EngineLostError, match="failed 3 times in a row, most recently: struck by the test"):
                await supervisor.generate(request_for(number))
        assert len(factory.built) == 3 and not supervisor.ready

    asyncio.run(scene())


def test_a_death_while_publishing_ends_with_all_versions_served(request_for):
    async def scene() -> None:
        def fate(engine: PlainEngine, number: int) -> None:
            plain = engine.publish

            async def dies_at_five(policy: PolicyVersion) -> None:
                if policy.version == 5 and number == 0:
                    raise DEATH
                await plain(policy)

            engine.publish = dies_at_five  # type: ignore[method-assign]

        factory = Factory(fate)
        supervisor = await started(factory)
        four, five = (PolicyVersion(version=number, adapter=NOWHERE, adapter_hash=f"hash-{number}") for number in (4, 5))
        await supervisor.publish(four)
        await supervisor.publish(five)
        assert factory.built[-1].served == {0: BASE, 4: four, 5: five} and len(factory.built) == 2

    asyncio.run(scene())


def test_a_request_that_makes_the_engine_fail_is_given_up_and_those_beside_it_are_answered(request_for):
    class Poisoned(PlainEngine):
        async def generate(self, request: GenerationRequest):
            if request.request_id == "r/3":
                self.dies = DEATH
            return await super().generate(request)

    async def scene() -> None:
        built: list[PlainEngine] = []

        def build() -> PlainEngine:
            built.append(Poisoned(delay_s=0.02))
            return built[-1]

        supervisor = EngineSupervisor(build, restarts=3)
        await supervisor.start()
        asked = [request_for(number) for number in range(8)]
        answers = await asyncio.gather(*(supervisor.generate(request) for request in asked), return_exceptions=True)
        assert isinstance(answers[3], EngineLostError) and "is given up" in str(answers[3])
        for request, answer in [pair for number, pair in enumerate(zip(asked, answers, strict=True)) if number != 3]:
            assert not isinstance(answer, BaseException), answer
            assert answer.token_ids.tolist() == expected_tokens(request, 0)
        assert supervisor.ready and supervisor.lost is None

    asyncio.run(scene())


def test_events_of_all_engines_are_summed(request_for):
    class Counting(PlainEngine):
        def events(self) -> dict[str, int]:
            return {"retries": 2}

    async def scene() -> None:
        built: list[Counting] = []

        def make() -> Counting:
            built.append(Counting(delay_s=0.0))
            return built[-1]

        supervisor = EngineSupervisor(make)
        await supervisor.start()
        built[0].dies = DEATH
        await supervisor.generate(request_for(1))
        assert supervisor.events() == {"engine_restarts": 1, "retries": 4}

    asyncio.run(scene())


@pytest.mark.parametrize("republished", ["refused", "slow"])
def test_no_engine_of_a_failed_or_cancelled_restart_runs_on(republished: str, request_for):
    running, factory = set[PlainEngine](), Factory()

    class Process(PlainEngine):
        async def start(self) -> None:
            running.add(self)

        async def publish(self, policy: PolicyVersion) -> None:
            if self is not factory.built[0]:
                await asyncio.sleep(60 if republished == "slow" else 0)
                raise DataError("the adapter is gone")

        async def close(self) -> None:
            await asyncio.sleep(0)
            running.discard(self)

    def build() -> PlainEngine:
        factory.built.append(Process())
        return factory.built[-1]

    async def scene() -> None:
        supervisor = EngineSupervisor(build)
        await supervisor.start()
        await supervisor.publish(PolicyVersion(version=1, adapter=NOWHERE, adapter_hash="hash-1"))
        factory.built[0].dies = DEATH
        asked = asyncio.create_task(supervisor.generate(request_for(1)))
        await asyncio.wait({asked}, timeout=0.1)
        assert asked.done() == (republished == "refused") and len(factory.built) > 1
        await supervisor.close()
        assert not running
        with pytest.raises((EngineLostError, asyncio.CancelledError)):
            await asked

    asyncio.run(scene())
