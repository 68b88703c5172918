"""While the trainer trains step s, the rollouts of the next `buffer_depth` steps are in flight: never fewer, never more."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import keep_ahead
from flows.keep_ahead import RolloutsAhead
from flows.run_settings import PipelineSettings
from storage.runs import RunPaths
from tasks.rollouts import RolloutReport

START_GROUPS = 6
LAST_STEP = 5


class Field:
    """Stands in for the rollout task: remembers what was begun and lets the test say when, and how, it ends."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int, int]] = []
        self.options: list[dict[str, Any]] = []
        self.running: dict[tuple[int, int], asyncio.Event] = {}
        self.cancelled: set[int] = set()
        self.fails: set[int] = set()
        self.seconds = 1.0

    def with_options(self, **options: Any) -> Callable[..., Coroutine[Any, Any, RolloutReport]]:
        self.options.append(options)
        return self.play

    async def play(self, resources: object, step: int, first_group: int, count: int) -> RolloutReport:
        self.begun.append((step, first_group, count))
        self.running[step, first_group] = asyncio.Event()
        try:
            await self.running[step, first_group].wait()
            if step in self.fails:
                raise RuntimeError(f"rollout of step {step} failed")
        except asyncio.CancelledError:
            self.cancelled.add(step)
            raise
        finally:
            del self.running[step, first_group]
        return RolloutReport(
            start_groups=count,
            decisions=first_group,
            failed_forks=0,
            orders_rejected=0,
            set_aside=0,
            seconds=self.seconds,
            queue_ms=0.0,
            prefill_ms=0.0,
            decode_ms=0.0,
            engine_ms=0.0,
        )

    def end(self, step: int) -> None:
        """Let the tasks of `step` end."""
        for (running_step, _), may_end in self.running.items():
            if running_step == step:
                may_end.set()

    async def steps_running(self) -> set[int]:
        """Steps that have a task under way, once everything that is ready has begun."""
        await asyncio.sleep(0)
        return {step for step, _ in self.running}


@pytest.fixture
def field(monkeypatch: pytest.MonkeyPatch) -> Field:
    """The stand-in, in the place of the task."""
    field = Field()
    monkeypatch.setattr(keep_ahead, "roll_out_groups", field)
    return field


def ahead(family: int = 1, **pipeline: Any) -> RolloutsAhead:
    nothing_yet = RunPaths(Path("/nonexistent"))
    standing = SimpleNamespace(lineage="main")
    rollouts = SimpleNamespace(start_groups=START_GROUPS, family=family)
    resources: Any = SimpleNamespace(rollouts=rollouts, paths=nothing_yet, standing=standing)
    return RolloutsAhead(resources, PipelineSettings(**pipeline), LAST_STEP)


@pytest.mark.parametrize("depth", [0, 1, 2, 4, 9])
def test_a_step_and_as_many_after_it_as_the_buffer_is_deep_are_in_flight(field: Field, depth: int):
    async def run() -> None:
        async with ahead(buffer_depth=depth) as rollouts:
            for step in range(1, LAST_STEP + 1):
                rollouts.top_up(step)
                coming = set(range(step, min(step + depth, LAST_STEP) + 1))
                assert await field.steps_running() == coming, "waiting for the step's own rollouts"
                field.end(step)
                await rollouts.take(step)
                assert await field.steps_running() == coming - {step}, "while the trainer trains"

    asyncio.run(run())
    assert sorted({step for step, _, _ in field.begun}) == list(range(1, LAST_STEP + 1))


@pytest.mark.parametrize("each", [0, 1, 4, 100], ids=lambda each: f"groups_per_task={each}")
def test_every_start_group_of_every_step_is_rolled_out_once(field: Field, each: int):
    async def run() -> None:
        async with ahead(buffer_depth=2, groups_per_task=each) as rollouts:
            for step in range(1, LAST_STEP + 1):
                rollouts.top_up(step)
                rollouts.top_up(step)
                await field.steps_running()
                field.end(step)
                taken = await rollouts.take(step)
                assert sum(report.start_groups for report in taken.reports) == START_GROUPS

    asyncio.run(run())
    groups = [(step, first + offset) for step, first, count in field.begun for offset in range(count)]
    assert sorted(groups) == [(group // START_GROUPS + 1, group) for group in range(LAST_STEP * START_GROUPS)]


@pytest.mark.parametrize("family", [2, 3])
@pytest.mark.parametrize("each", [1, 2, 4, 5], ids=lambda each: f"groups_per_task={each}")
def test_what_branches_off_a_start_group_is_played_in_its_task(field: Field, each: int, family: int):
    async def run() -> None:
        async with ahead(family, buffer_depth=0, groups_per_task=each) as rollouts:
            rollouts.top_up(1)
            await field.steps_running()
            field.end(1)
            await rollouts.take(1)

    asyncio.run(run())
    assert sum(count for _, _, count in field.begun) == START_GROUPS
    assert all(first % family == 0 and count % family == 0 for _, first, count in field.begun)


def test_the_measured_time_of_a_start_group_sizes_later_tasks_unless_the_run_must_repeat(field: Field):
    field.seconds = 6 * START_GROUPS  # six seconds a start group: Prefect is cheap enough for one task each

    async def run(**pipeline: Any) -> list[int]:
        field.begun.clear()
        async with ahead(buffer_depth=0, **pipeline) as rollouts:
            for step in (1, 2):
                rollouts.top_up(step)
                await field.steps_running()
                field.end(step)
                await rollouts.take(step)
        return [count for _, _, count in field.begun]

    assert asyncio.run(run()) == [START_GROUPS] + [1] * START_GROUPS
    assert asyncio.run(run(deterministic=True)) == [START_GROUPS, START_GROUPS]


def test_a_task_is_told_its_time_limit_and_its_retries(field: Field):
    async def run() -> None:
        async with ahead(buffer_depth=0, rollout_timeout_s=7.5, rollout_retries=1) as rollouts:
            rollouts.top_up(1)

    asyncio.run(run())
    assert [(told["timeout_seconds"], told["retries"]) for told in field.options] == [(7.5, 1)]


def test_a_rollout_that_fails_for_good_fails_its_step_and_ends_all_others(field: Field):
    field.fails = {2}

    async def run() -> None:
        with pytest.raises(RuntimeError, match="rollout of step 2 failed"):
            async with ahead(buffer_depth=2, groups_per_task=3) as rollouts:
                for step in (1, 2):
                    rollouts.top_up(step)
                    await field.steps_running()
                    field.end(step)
                    await rollouts.take(step)
        assert field.cancelled == {3, 4} and field.running == {}, "before the loop ends, which would cancel them too"

    asyncio.run(run())


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
def test_whatever_ends_the_training_ends_the_rollouts_in_flight(field: Field, error: type[BaseException]):
    async def run() -> None:
        with pytest.raises(error):
            async with ahead(buffer_depth=2) as rollouts:
                rollouts.top_up(1)
                assert await field.steps_running() == {1, 2, 3}
                raise error
        assert field.cancelled == {1, 2, 3} and field.running == {}

    asyncio.run(run())


def test_where_enough_lies_ready_nothing_runs_ahead_and_every_other_step_plays_nothing(field: Field):
    played: dict[int, set[int]] = {}

    async def run() -> None:
        async with ahead(buffer_depth=2, ready_groups_max=10) as rollouts:
            for step, ready in enumerate([0, 10, 25, 25, 3], start=1):
                rollouts.top_up(step, ready)
                await field.steps_running()
                played[step] = {begun for begun, _, _ in field.begun}
                for wanted in played[step]:
                    field.end(wanted)
                taken = await rollouts.take(step)
                assert bool(taken.reports) == (step in played[step])

    asyncio.run(run())
    assert played == {1: {1, 2, 3}, 2: {1, 2, 3}, 3: {1, 2, 3}, 4: {1, 2, 3}, 5: {1, 2, 3, 5}}


def test_it_never_pauses_in_two_steps_running(field: Field):
    async def run() -> None:
        async with ahead(buffer_depth=0, ready_groups_max=1) as rollouts:
            for step in range(1, LAST_STEP + 1):
                rollouts.top_up(step, 5)
                await field.steps_running()
                field.end(step)
                await rollouts.take(step)

    asyncio.run(run())
    assert [step for step, _, _ in field.begun] == [1, 3, 5]
