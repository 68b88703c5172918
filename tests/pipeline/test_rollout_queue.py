"""Which start groups are in flight, when a step may begin, and what takes the place of those that hang, fail or come too late."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import buffered_queue, rollout_queue
from pipeline.buffered_queue import FAILURES_IN_A_ROW, BufferedQueue
from pipeline.lockstep_queue import LockstepQueue
from pipeline.play import RolloutReport
from pipeline.rollout_queue import RolloutQueue
from pipeline.rollout_source import Stretch
from pipeline.run_settings import PipelineSettings
from records.policy_version import BASE
from storage.runs import RunPaths
from storage.totals import Eligible
from telemetry.timing import Spans
from tests.waiting import Found, run_in_virtual_time
from training.messages import ResumePoint, TrainedStep

START_GROUPS = 6
LAST_STEP = 6


class Field:
    """Source and trainer in one: the test says when and how a stretch ends; what was published and not yet trained is ready."""

    def __init__(self) -> None:
        self.begun: list[Stretch] = []
        self.running: dict[Stretch, asyncio.Future[None]] = {}
        self.cancelled: list[Stretch] = []
        self.dull: set[int] = set()
        """Start groups that teach nothing."""
        self.ready: list[int] = []
        self.expired = 0
        self.seconds = 1.0

    async def play(self, stretch: Stretch) -> RolloutReport:
        self.begun.append(stretch)
        self.running[stretch] = asyncio.get_running_loop().create_future()
        try:
            await self.running[stretch]
        except asyncio.CancelledError:
            self.cancelled.append(stretch)
            raise
        finally:
            del self.running[stretch]
        numbers = range(stretch.first_group, stretch.first_group + stretch.count)
        self.ready += [number for number in numbers if number not in self.dull]
        nothing = {"decisions": 0, "failed_forks": 0, "orders_rejected": 0, "set_aside": 0}
        seconds = self.seconds * stretch.count
        return RolloutReport(start_groups=stretch.count, seconds=seconds, engine_work=None, engine_ms=None, **nothing)

    def eligible(self, step: int, start_groups: int) -> Eligible:
        return Eligible(start_groups=len(self.ready), advantage_groups=3 * len(self.ready), expired=self.expired)

    def end(self, *first_groups: int, error: Exception | None = None) -> None:
        """Let stretches that begin with these start groups end; all that run, if none is named."""
        for stretch, end in list(self.running.items()):
            if not end.done() and (not first_groups or stretch.first_group in first_groups):
                end.set_exception(error) if error else end.set_result(None)

    def train(self) -> None:
        """Use up what a step takes: the oldest."""
        del self.ready[:START_GROUPS]

    @property
    def numbers_running(self) -> list[int]:
        return sorted(number for each in self.running for number in range(each.first_group, each.first_group + each.count))


async def settled(task: "asyncio.Task[Any] | None" = None) -> None:
    """Everything that can go on has."""
    for _ in range(20):
        await asyncio.sleep(0.002)
        if task is not None and task.done():
            return


@pytest.fixture
def field(monkeypatch: pytest.MonkeyPatch) -> Field:
    monkeypatch.setattr(buffered_queue, "POLL_S", 0.01)
    return Field()


def queue(
    field: Field,
    paths: RunPaths | None = None,
    **pipeline: Any,
) -> RolloutQueue:
    resources: Any = SimpleNamespace(
        rollouts=SimpleNamespace(start_groups=START_GROUPS),
        paths=paths or RunPaths(Path("/nonexistent")),
        resume_point=ResumePoint(last=TrainedStep(published=BASE, metrics={}), set_aside=()),
        trainer=field,
        spans=Spans(),
        max_policy_lag=2,
    )
    settings = PipelineSettings(**pipeline)
    if settings.deterministic:
        return LockstepQueue(resources, field, settings, LAST_STEP)
    return BufferedQueue(resources, field, settings, LAST_STEP)


def scene(run: Callable[[], Coroutine[Any, Any, Found]]) -> Found:
    return run_in_virtual_time(run(), buffered_queue, rollout_queue)


async def take(rollouts: RolloutQueue, step: int, field: Field) -> asyncio.Task[Any]:
    """Ask for a step's rollouts, and let all that can happen."""
    taken = asyncio.create_task(rollouts.take(step))
    await settled(taken)
    return taken


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_while_a_step_trains_as_many_steps_of_start_groups_as_the_buffer_is_deep_are_in_flight_or_ready(field: Field, depth: int):
    async def run() -> None:
        async with queue(field, buffer_depth=depth, groups_per_task=1) as rollouts:
            for step in range(1, LAST_STEP + 1):
                taken = await take(rollouts, step, field)
                await settled()  # what is played ahead may begin after the step has its own
                coming = min(depth, LAST_STEP - step) * START_GROUPS
                assert len(field.running) + len(field.ready) == START_GROUPS + coming
                field.end()
                await settled(taken)
                assert taken.done() and len(field.running) + len(field.ready) == START_GROUPS + coming
                field.train()

    scene(run)
    numbers = [stretch.first_group for stretch in field.begun]
    assert numbers == list(range(LAST_STEP * START_GROUPS)), "each once, in order"
    assert all(stretch.step == stretch.first_group // START_GROUPS + 1 for stretch in field.begun)


def test_a_step_begins_with_whichever_start_groups_are_ready_first_and_never_waits_for_the_slowest(field: Field):
    async def run() -> None:
        async with queue(field, buffer_depth=1, groups_per_task=1) as rollouts:
            taken = await take(rollouts, 1, field)
            field.end(*range(1, START_GROUPS))  # all of the first step's but its first
            await settled(taken)
            assert not taken.done(), "one is missing"
            field.end(START_GROUPS + 3)  # one of the next step's
            await settled(taken)
            assert taken.done() and 0 in field.numbers_running

    scene(run)


def test_start_groups_that_teach_nothing_are_replaced_up_to_a_bound(field: Field, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipeline.buffered_queue.BACKFILL_MAX", 0.5)
    field.dull = set(range(1000))

    async def run() -> None:
        async with queue(field, buffer_depth=0, groups_per_task=1) as rollouts:
            taken = await take(rollouts, 1, field)
            for _ in range(12):
                field.end()
                await settled(taken)
            assert taken.done() and len(field.begun) == START_GROUPS * 1.5, "half as many again, then the step has what it has"
            field.dull = {number for number in field.dull if number % 2}
            field.begun.clear()
            taken = await take(rollouts, 2, field)
            for _ in range(12):
                field.end()
                await settled(taken)
            assert taken.done() and len(field.ready) >= START_GROUPS - 2

    scene(run)


def test_a_stretch_that_hangs_is_replaced_by_new_start_groups_and_what_it_brings_late_is_used(
    field: Field, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pipeline.buffered_queue.STRAGGLER_FACTOR", 2.0)
    field.seconds = 0.2

    async def run() -> None:
        async with queue(field, buffer_depth=0, groups_per_task=1) as rollouts:
            taken = await take(rollouts, 1, field)
            field.end(*range(1, START_GROUPS))
            async with asyncio.timeout(20):  # until there is another in its place
                while [each.first_group for each in field.running] != [0, START_GROUPS]:
                    await asyncio.sleep(0.02)
            field.end(START_GROUPS)
            await settled(taken)
            assert taken.done() and taken.result().queue["queue/passed_over"] == 1
            field.train()
            field.end(0)
            await settled()
            assert field.ready == [0]

    scene(run)


def test_a_stretch_that_fails_is_played_again_and_several_in_a_row_end_the_run_with_the_last_ones_sentence(field: Field):
    async def run() -> None:
        async with queue(field, buffer_depth=0, groups_per_task=3) as rollouts:
            taken = await take(rollouts, 1, field)
            field.end(0, error=RuntimeError("no luck"))
            await settled()
            assert field.numbers_running == list(range(START_GROUPS)), "the same start groups, again"
            field.end()
            await settled(taken)
            assert taken.result().queue["queue/failed"] == 1
            field.train()
            taken = await take(rollouts, 2, field)
            for attempt in range(FAILURES_IN_A_ROW):
                assert not taken.done()
                field.end(START_GROUPS, error=RuntimeError(f"attempt {attempt + 1}"))
                await settled(taken)
            with pytest.raises(RuntimeError, match=f"attempt {FAILURES_IN_A_ROW}"):
                await taken
        assert field.running == {}

    scene(run)


def test_what_can_only_bring_rows_beyond_the_budget_is_cancelled_and_its_start_groups_are_played_anew(field: Field):
    async def run() -> None:
        async with queue(field, buffer_depth=1, groups_per_task=1) as rollouts:
            taken = await take(rollouts, 1, field)
            field.end(*range(1, 2 * START_GROUPS))
            await settled(taken)
            for version in (1, 2):
                rollouts._on_served(version)
                await settled()
                assert field.cancelled == [], "a lag of two is allowed"
            rollouts._on_served(3)
            await settled()
            assert [each.first_group for each in field.cancelled] == [0]
            field.train()
            taken = await take(rollouts, 4, field)
            assert [each.first_group for each in field.begun].count(0) == 2, "its position is not lost"
            taken.cancel()

    scene(run)


def test_in_step_all_of_a_steps_own_start_groups_are_waited_for_and_one_that_fails_ends_the_run(field: Field):
    async def run() -> None:
        with pytest.raises(RuntimeError, match="no luck"):
            async with queue(field, buffer_depth=0, deterministic=True, groups_per_task=3) as rollouts:
                taken = await take(rollouts, 1, field)
                field.ready = list(range(100))
                field.end(0)
                await settled(taken)
                assert not taken.done(), "whatever lies ready"
                field.end(3)
                await taken
                taken = await take(rollouts, 2, field)
                field.end(START_GROUPS, error=RuntimeError("no luck"))
                await taken
        assert field.running == {}

    scene(run)


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
def test_whatever_ends_the_training_ends_the_rollouts_in_flight(field: Field, error: type[BaseException]):
    async def run() -> None:
        with pytest.raises(error):
            async with queue(field, buffer_depth=2, groups_per_task=2) as rollouts:
                await take(rollouts, 1, field)
                assert len(field.running) == 9
                raise error
        assert len(field.cancelled) == 9 and field.running == {}

    scene(run)


def test_in_step_and_overlapped_the_next_steps_start_groups_are_begun_once_and_held_until_this_step_has_chosen(field: Field):
    async def run() -> None:
        async with queue(field, buffer_depth=1, deterministic=True) as rollouts:
            taken = await take(rollouts, 1, field)
            assert [(each.step, each.after) for each in field.running] == [(1, None)], "nothing ahead of the first is begun"
            field.end()
            assert (await taken).ready_share == 0.0
            for step in range(1, LAST_STEP):
                rollouts.play_ahead(step)
                await settled()
                (ahead,) = field.running
                assert (ahead.step, ahead.count) == (step + 1, START_GROUPS)
                assert ahead.after == Path(f"/nonexistent/ledger/step-{step:06d}.arrow")
                slow = step % 2
                if not slow:
                    field.end()
                    await settled()
                taken = await take(rollouts, step + 1, field)
                assert taken.done() is not bool(slow), "all of it is waited for"
                field.end()
                assert (await taken).ready_share == (0.0 if slow else 1.0)
            rollouts.play_ahead(LAST_STEP)
            await settled()
            assert not field.running, "nothing is played that no step would train on"

    scene(run)
    assert [stretch.step for stretch in field.begun] == list(range(1, LAST_STEP + 1))
