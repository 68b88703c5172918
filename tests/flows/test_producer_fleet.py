"""A fleet begins as many producers as are asked for, replaces what is lost, and never stands in training's way."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from flows import producer_fleet as module
from flows.producer_fleet import ProducerFleet
from pipeline.run_settings import RunSettings
from records.policy_version import PolicyVersion
from storage.control import ControlDesk, ProducerStatus, read_control, write_producer
from storage.runs import RunPaths


@dataclass
class Asked:
    """In the place of Prefect: what it was asked, and what it refuses."""

    begun: list[dict[str, Any]]
    cancelled: list[tuple[UUID, str]]
    runs: dict[str, UUID]
    refuses: str = ""
    state: Any = None

    async def begin(self, deployment: str, *, parameters: dict[str, Any], **_: Any) -> Any:
        if self.refuses:
            raise ConnectionError(self.refuses)
        self.begun.append({"deployment": deployment, **parameters})
        self.runs[parameters["producer"]] = uuid4()
        return SimpleNamespace(id=self.runs[parameters["producer"]])

    async def set(self, flow_run: UUID, state: Any) -> None:
        self.cancelled.append((flow_run, state.type.value))

    async def read(self, flow_run: UUID) -> Any:
        return SimpleNamespace(state=self.state)


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked([], [], {})
    monkeypatch.setattr(module, "arun_deployment", asked.begin)
    monkeypatch.setattr(module, "_set_state", asked.set)
    monkeypatch.setattr(module, "_read_flow_run", asked.read)
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    monkeypatch.setattr(module, "ENDS_WITHIN_S", 1.0)
    monkeypatch.setattr(ProducerFleet, "_delay_next_start", lambda fleet: None)
    return asked


class Run:
    """A run's folder, and producers that are nothing but their status files."""

    def __init__(self, folder: Path) -> None:
        self.paths = RunPaths(folder / "mine").create()
        self.desk = ControlDesk(self.paths, base_model="b", plays="p", quota=4, max_policy_lag=2)
        self.desk.serve(PolicyVersion(version=0, adapter=None, adapter_hash="base"))

    def fleet(self, least: int, most: int) -> ProducerFleet:
        pipeline = {"producers_min": least, "producers_max": most}
        settings = RunSettings.model_validate({"run": "mine", "runs_root": self.paths.root.parent, "pipeline": pipeline})
        resources: Any = SimpleNamespace(paths=self.paths, control=self.desk)
        return ProducerFleet(resources, settings)

    def tells(self, producer: str, state: Any = "playing", **told: Any) -> None:
        now = time.time()
        status = ProducerStatus(
            producer=producer, state=state, published=2, in_flight=1, next_group=3, version=0, alive_at=now, began_at=now,
            host="there", pid=1, flow_run="", sentence="",
        )  # fmt: skip
        write_producer(self.paths, replace(status, **told))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


async def until(done: Callable[[], Any]) -> Any:
    for _ in range(1500):
        if answer := done():
            return answer
        await asyncio.sleep(0.02)
    raise AssertionError("it does not come about")


def test_as_many_as_are_asked_for_within_the_bounds_and_each_by_a_name_of_its_own(run: Run, prefect: Asked):
    async def go() -> None:
        async with run.fleet(1, 2) as fleet:
            await until(lambda: len(prefect.begun) == 1)
            fleet.set_target(9)
            await until(lambda: len(prefect.begun) == 2)
            await asyncio.sleep(0.2)
            assert fleet.status().asked == 2 and fleet.status().starting == 2 and fleet.status().alive == 0
            for name in ("fleet-0001", "fleet-0002"):
                run.tells(name)
            standing = await until(lambda: fleet.status().alive == 2 and fleet.status())
            assert (standing.starting, standing.published, standing.in_flight, standing.lost) == (0, 4, 2, 0)
            assert (standing.playing, standing.proven) == (2, 2)
            run.tells("fleet-0001", "waiting", published=0)
            await until(lambda: (fleet.status().playing, fleet.status().proven) == (1, 1))
            for name in ("fleet-0001", "fleet-0002"):
                run.tells(name, "ended")
            run.desk.stop("over")

    asyncio.run(go())
    assert [each["producer"] for each in prefect.begun] == ["fleet-0001", "fleet-0002"]
    assert prefect.begun[0] == {
        "deployment": "rollout-producer/play-rollouts",
        "run": "mine",
        "runs_root": str(run.paths.root.parent),
        "producer": "fleet-0001",
    }


def test_what_is_lost_or_failed_is_replaced_under_another_name(run: Run, prefect: Asked, said: list[str]):
    async def go() -> None:
        async with run.fleet(1, 1) as fleet:
            await until(lambda: prefect.begun)
            run.tells("fleet-0001", alive_at=time.time() - 3600)
            await until(lambda: len(prefect.begun) == 2)
            run.tells("fleet-0002", "ended", sentence="the model is not here")
            await until(lambda: len(prefect.begun) == 3)
            assert fleet.status().lost == 2

    asyncio.run(go())
    assert [each["producer"] for each in prefect.begun] == ["fleet-0001", "fleet-0002", "fleet-0003"]
    assert any("fleet-0001' on there is lost" in sentence for sentence in said)
    assert any("fleet-0002' on there ended: the model is not here" in sentence for sentence in said)


def test_one_that_failed_before_it_could_say_so_is_learned_of_from_prefect(
    run: Run, prefect: Asked, said: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "ASK_PREFECT_S", 0.0)
    prefect.state = SimpleNamespace(is_final=lambda: True, message="there is no run in 'runs/mine'", name="Failed")

    async def go() -> None:
        async with run.fleet(1, 1):
            await until(lambda: len(prefect.begun) >= 2)

    asyncio.run(go())
    assert any("'fleet-0001' did not start: there is no run in 'runs/mine'" in sentence for sentence in said)


def test_too_many_are_dismissed_and_one_that_was_begun_by_hand_counts_but_stays(run: Run, prefect: Asked):
    run.tells("by-hand")

    async def go() -> None:
        async with run.fleet(0, 2) as fleet:
            fleet.set_target(2)
            await until(lambda: prefect.begun)
            await asyncio.sleep(0.2)
            assert len(prefect.begun) == 1, "one is there already"
            run.tells("fleet-0001")
            await until(lambda: fleet.status().alive == 2)
            fleet.set_target(0)
            await until(lambda: not read_control(run.paths).wants("fleet-0001"))
            assert read_control(run.paths).wants("by-hand") and prefect.cancelled == []

    asyncio.run(go())
    assert read_control(run.paths).stop, "at the end of training all are told, whoever began them"


def test_a_prefect_that_refuses_is_said_once_and_nothing_waits(run: Run, prefect: Asked, said: list[str]):
    prefect.refuses = "no server"

    async def go() -> float:
        async with run.fleet(1, 1) as fleet:
            began = time.monotonic()
            fleet.set_target(1)
            fleet.status()
            took = time.monotonic() - began
            await asyncio.sleep(0.3)
            prefect.refuses = ""
            await until(lambda: prefect.begun)
            return took

    assert asyncio.run(go()) < 1
    assert len([sentence for sentence in said if "no server" in sentence and "training continues" in sentence]) == 1


def test_at_the_end_producers_are_told_by_file_and_those_who_do_not_hear_by_prefect(run: Run, prefect: Asked):
    async def go() -> None:
        async with run.fleet(3, 3):
            await until(lambda: len(prefect.begun) == 3)
            run.tells("fleet-0001")
            run.tells("fleet-0002")

            async def hears() -> None:
                await until(lambda: read_control(run.paths).stop)
                run.tells("fleet-0001", "ended", sentence="its training has ended")

            await asyncio.sleep(0.2)
            listening = asyncio.create_task(hears())
        await listening

    asyncio.run(go())
    assert read_control(run.paths).stop
    cancelled = dict(prefect.cancelled)
    assert cancelled == {prefect.runs["fleet-0002"]: "CANCELLING", prefect.runs["fleet-0003"]: "CANCELLED"}


def test_producers_of_a_run_that_was_killed_and_resumed_play_on(run: Run, prefect: Asked):
    mine = uuid4()
    run.tells("fleet-0007", flow_run=str(mine))

    async def go() -> None:
        async with run.fleet(1, 1) as fleet:
            await asyncio.sleep(0.3)
            assert prefect.begun == [] and fleet.status().alive == 1
            run.tells("fleet-0007", alive_at=time.time() - 3600)
            await until(lambda: prefect.begun)

    asyncio.run(go())
    assert prefect.begun[0]["producer"] == "fleet-0008", "a name is not used twice"
