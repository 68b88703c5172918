"""Which start groups are in flight, when a step may begin, and what a failure ends."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from entente.records.policy_version import BASE, PolicyVersion, TrainedStep
from entente.rollouts.figures import Figures
from entente.rollouts.groups import GroupRange
from entente.telemetry.timing import Spans
from storage.ledger import ROWS_SCHEMA, Eligible, write_ledger
from storage.runs import RunPaths
from storage.shards import LOCAL_PRODUCER, publish_shard
from tasks import rollout_queue
from tasks.rollout_queue import RolloutQueue
from tests.storage.make_rows import make_decision
from tests.waiting import Found, run_in_virtual_time

START_GROUPS = 6
LAST_STEP = 6


class Field:
    """Source and trainer in one: the test says when and how a range of groups ends; what was published and
    not yet trained is ready."""

    def __init__(self) -> None:
        self.begun: list[GroupRange] = []
        self.running: dict[GroupRange, asyncio.Future[None]] = {}
        self.cancelled: list[GroupRange] = []
        self.dull: set[int] = set()
        """Start groups that teach nothing."""
        self.ready: list[int] = []
        self.expired = 0

    async def play(self, group_range: GroupRange) -> Figures:
        self.begun.append(group_range)
        self.running[group_range] = asyncio.get_running_loop().create_future()
        try:
            await self.running[group_range]
        except asyncio.CancelledError:
            self.cancelled.append(group_range)
            raise
        finally:
            del self.running[group_range]
        numbers = range(group_range.first_group, group_range.first_group + group_range.count)
        self.ready += [number for number in numbers if number not in self.dull]
        return {"start_groups": group_range.count}

    def eligible(self, step: int, start_groups: int) -> Eligible:
        return Eligible(start_groups=len(self.ready), advantage_groups=3 * len(self.ready), expired=self.expired)

    def end(self, *first_groups: int, error: Exception | None = None) -> None:
        """Let ranges of groups that begin with these start groups end; all that run, if none is named."""
        for group_range, end in list(self.running.items()):
            if not end.done() and (not first_groups or group_range.first_group in first_groups):
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
def field() -> Field:
    return Field()


def queue(field: Field, depth: int, groups_per_task: int = 1, paths: RunPaths | None = None, **resumed: Any) -> RolloutQueue:
    resources: Any = SimpleNamespace(
        rollouts=SimpleNamespace(start_groups=START_GROUPS),
        paths=paths or RunPaths(Path("/nonexistent")),
        tokens=SimpleNamespace(thinking=None),
        resume_point=TrainedStep(published=BASE, metrics={}),
        trainer=field,
        spans=Spans(),
    )
    return RolloutQueue(resources, field.play, depth=depth, last_step=LAST_STEP, groups_per_task=groups_per_task, **resumed)


def scene(run: Callable[[], Coroutine[Any, Any, Found]]) -> Found:
    return run_in_virtual_time(run())


async def take(rollouts: RolloutQueue, step: int) -> asyncio.Task[Any]:
    """Ask for a step's rollouts, and let all that can happen."""
    taken = asyncio.create_task(rollouts.take(step))
    await settled(taken)
    return taken


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_while_a_step_trains_as_many_steps_of_start_groups_as_the_buffer_is_deep_are_in_flight(field: Field, depth: int):
    async def run() -> None:
        async with queue(field, depth) as rollouts:
            for step in range(1, LAST_STEP + 1):
                taken = await take(rollouts, step)
                field.end(*range((step - 1) * START_GROUPS, step * START_GROUPS))
                await settled(taken)
                assert taken.done()
                field.train()
                rollouts.play_ahead(step)
                await settled()
                assert len(field.running) == min(depth, LAST_STEP - step) * START_GROUPS

    scene(run)
    numbers = [group_range.first_group for group_range in field.begun]
    assert numbers == list(range(LAST_STEP * START_GROUPS)), "each once, in order, and none that no step would train on"
    assert all(group_range.step == group_range.first_group // START_GROUPS + 1 for group_range in field.begun)


def test_with_a_buffer_a_step_begins_with_whichever_start_groups_are_ready_first_and_never_waits_for_the_slowest(field: Field):
    async def run() -> None:
        async with queue(field, 2) as rollouts:
            taken = await take(rollouts, 1)
            field.end()
            await taken
            field.train()
            rollouts.play_ahead(1)
            taken = await take(rollouts, 2)
            field.end(*range(START_GROUPS + 1, 2 * START_GROUPS))  # all of the second step's but its first
            await settled(taken)
            assert not taken.done(), "one is missing"
            field.end(2 * START_GROUPS + 3)  # one of the next step's
            await settled(taken)
            assert taken.done() and START_GROUPS in field.numbers_running
            field.train()
            field.end(START_GROUPS)
            await settled()
            assert field.ready == [START_GROUPS], "what comes late is used"

    scene(run)


def test_a_step_whose_start_groups_teach_nothing_takes_what_there_is(field: Field):
    field.dull = set(range(1, 1000))

    async def run() -> None:
        async with queue(field, 2) as rollouts:
            taken = await take(rollouts, 1)
            field.end()
            assert (await taken).queue["queue/ready"] == 1

    scene(run)


def test_the_ready_share_is_of_the_step_s_own_start_groups_whatever_earlier_ones_are_still_played(field: Field):
    async def run() -> None:
        async with queue(field, 3) as rollouts:
            taken = await take(rollouts, 1)
            field.end()
            await taken
            rollouts.play_ahead(1)
            await settled()
            field.end(*range(2 * START_GROUPS, 3 * START_GROUPS - 1))  # of the third step all but one, and none of the second
            await settled()
            assert (await rollouts.take(2)).ready_share == 0.0
            assert (await rollouts.take(3)).ready_share == pytest.approx(1 - 1 / START_GROUPS)

    scene(run)


def test_what_became_too_old_is_counted_since_the_step_before(field: Field):
    async def run() -> None:
        counted = []
        async with queue(field, 2) as rollouts:
            for step, expired in ((1, 5), (2, 5), (3, 7)):
                field.expired = expired
                taken = await take(rollouts, step)
                field.end()
                counted.append((await taken).queue["queue/expired"])
                field.train()
        assert counted == [0, 0, 2], "the first step of a resumed run does not count those of before"

    scene(run)


@pytest.mark.parametrize("depth", [0, 1])
def test_without_a_buffer_a_step_waits_for_all_its_own_start_groups_and_one_that_fails_ends_the_run(field: Field, depth: int):
    async def run() -> None:
        with pytest.raises(RuntimeError, match="no luck"):
            async with queue(field, depth, groups_per_task=3) as rollouts:
                taken = await take(rollouts, 1)
                field.ready = list(range(100))
                field.end(0)
                await settled(taken)
                assert not taken.done(), "whatever lies ready"
                field.end(3)
                await taken
                taken = await take(rollouts, 2)
                field.end(START_GROUPS, error=RuntimeError("no luck"))
                await taken
        assert field.running == {}

    scene(run)


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
def test_whatever_ends_the_training_ends_the_rollouts_in_flight(field: Field, error: type[BaseException]):
    async def run() -> None:
        with pytest.raises(error):
            async with queue(field, 2, groups_per_task=2) as rollouts:
                rollouts.play_ahead(1)
                await settled()
                assert len(field.running) == 9
                raise error
        assert len(field.cancelled) == 9 and field.running == {}

    scene(run)


def test_one_step_ahead_the_start_groups_are_begun_once_and_held_until_this_step_has_chosen(field: Field):
    async def run() -> None:
        async with queue(field, 1, groups_per_task=START_GROUPS) as rollouts:
            taken = await take(rollouts, 1)
            assert [(each.step, each.after) for each in field.running] == [(1, None)], "nothing ahead of the first is begun"
            field.end()
            first = await taken
            assert first.ready_share == 0.0 and set(first.queue) == {"queue/depth", "queue/in_flight"}
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
                taken = await take(rollouts, step + 1)
                assert taken.done() is not bool(slow), "all of it is waited for"
                field.end()
                assert (await taken).ready_share == (0.0 if slow else 1.0)
            rollouts.play_ahead(LAST_STEP)
            await settled()
            assert not field.running, "nothing is played that no step would train on"

    scene(run)
    assert [group_range.step for group_range in field.begun] == list(range(1, LAST_STEP + 1))


@pytest.mark.parametrize(
    ("depth", "before", "counted"),
    [(1, 1, [START_GROUPS]), (2, 2, []), (1, 2, []), (2, 1, [START_GROUPS]), (1, None, [START_GROUPS]), (2, None, [])],
)
def test_rollouts_of_an_earlier_process_are_counted_unless_the_step_that_they_were_played_beside_has_logged_them(
    field: Field, tmp_path: Path, depth: int, before: int | None, counted: list[int]
):
    paths, rng = RunPaths(tmp_path).create(), random.Random(0)
    rows = [
        make_decision(rng, LOCAL_PRODUCER, start_group=START_GROUPS + group, fork=fork)
        for group in range(START_GROUPS)
        for fork in range(2)
    ]
    publish_shard(paths, LOCAL_PRODUCER, START_GROUPS, rows, [], {"run": "run"}, next_start_group=2 * START_GROUPS)
    field.ready = list(range(START_GROUPS))
    logged = {} if before is None else {"queue/depth": before}  # metrics of an earlier release have no depth
    resumed = {"step_done": 1, "logged": {1: logged}}

    async def run() -> list[float]:
        async with queue(field, depth, paths=paths, **resumed) as rollouts:
            return [report["start_groups"] for report in (await rollouts.take(2)).reports]

    assert scene(run) == counted and not field.begun


@pytest.mark.parametrize("fails", [False, True])
def test_one_step_ahead_a_step_trains_while_the_one_before_is_published_and_only_rollouts_wait_for_it(field: Field, fails: bool):
    served: list[int] = []

    async def serve(policy: PolicyVersion) -> None:
        served.append(policy.version)

    async def run() -> None:
        rollouts = queue(field, 1)
        rollouts._resources.serve = serve
        saved = asyncio.get_running_loop().create_future()
        async with rollouts:
            await take(rollouts, 1)
            field.end()
            await settled()
            rollouts.play_ahead(1)
            await settled()
            await rollouts.hand_over(saved, at_once=False)
            field.end()
            taken = await take(rollouts, 2)
            await settled(taken)
            assert taken.done() and not served, "step 2 may train"
            rollouts.play_ahead(2)
            await settled()
            assert not field.running, "the rollouts of step 3 are sampled by version 1"
            if fails:
                saved.set_exception(OSError("no space"))
            else:
                saved.set_result(step(1))
            await settled()
            assert served == [] if fails else served == [1] and len(field.running) == START_GROUPS
            field.end()
            await (await take(rollouts, 3))

    if fails:
        with pytest.raises(OSError, match="no space"):
            scene(run)
    else:
        scene(run)


def step(version: int) -> PolicyVersion:
    return PolicyVersion(version=version, adapter=Path(f"v{version}"), adapter_hash=f"hash-{version}")


@pytest.mark.parametrize(
    ("step_done", "depth", "at_first", "at_the_end"),
    [(0, 1, [], []), (1, 1, [0], [0, 1]), (5, 1, [4], [4, 5]), (1, 0, [1], [1]), (5, 0, [5], [5]), (5, 2, [5], [5])],
)
def test_a_run_goes_on_with_the_version_that_it_would_have_played(
    monkeypatch: pytest.MonkeyPatch, step_done: int, depth: int, at_first: list[int], at_the_end: list[int]
):
    served: list[int] = []

    async def serve(policy: PolicyVersion) -> None:
        served.append(policy.version)

    last = TrainedStep(published=step(step_done) if step_done else BASE, metrics={})
    resources: Any = SimpleNamespace(rollouts=SimpleNamespace(start_groups=2), paths=None, resume_point=last, serve=serve)
    monkeypatch.setattr(rollout_queue, "read_adapter", lambda paths, version: step(version))

    async def opened(*, fails: bool) -> list[int]:
        at_once = list[int]()
        with contextlib.suppress(RuntimeError):
            async with RolloutQueue(resources, Field().play, depth=depth, last_step=9, groups_per_task=1):
                at_once = list(served)
                if fails:
                    raise RuntimeError
        return at_once

    assert asyncio.run(opened(fails=False)) == at_first and served == at_the_end
    served.clear()
    assert asyncio.run(opened(fails=True)) == at_first == served, "a run that fails serves nothing more"


@pytest.mark.parametrize(("depth", "order"), [(1, ["serve 4", "play 5", "play 5", "serve 5"]), (2, ["serve 5"])])
def test_a_version_that_is_scored_after_a_resume_waits_for_rollouts_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, depth: int, order: list[str]
):
    happened: list[str] = []

    async def serve(policy: PolicyVersion) -> None:
        happened.append(f"serve {policy.version}")

    async def play(group_range: GroupRange) -> Figures:
        await asyncio.sleep(0.01)
        happened.append(f"play {group_range.step - 1}")
        return {}

    last = TrainedStep(published=step(5), metrics={})
    paths = RunPaths(tmp_path)
    resources: Any = SimpleNamespace(rollouts=SimpleNamespace(start_groups=2), paths=paths, resume_point=last, serve=serve)
    monkeypatch.setattr(rollout_queue, "read_adapter", lambda paths, version: step(version))

    async def score() -> None:
        async with RolloutQueue(resources, play, depth=depth, last_step=9, groups_per_task=1, step_done=5) as rollouts:
            await rollouts.catch_up(5)
            assert happened == order

    asyncio.run(score())


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shard_that_an_earlier_step_trained_on_stays_though_its_phases_are_lost(field: Field, tmp_path: Path, depth: int):
    """Also if the run is resumed with a shallower buffer than that step had."""
    paths, other = RunPaths(tmp_path).create(), START_GROUPS + 1
    for group in (START_GROUPS, other):
        rows = [make_decision(random.Random(group), LOCAL_PRODUCER, start_group=group, fork=fork) for fork in range(2)]
        publish_shard(paths, LOCAL_PRODUCER, group, rows, [], {"run": "run"}).phases_path.unlink()
    named = f"{LOCAL_PRODUCER}/{START_GROUPS:06d}.arrow"
    row = {each.name: (named if each.name == "shard" else "") if each.type == pa.string() else 0 for each in ROWS_SCHEMA}
    write_ledger(paths, 1, pa.Table.from_pylist([row], ROWS_SCHEMA), {})
    missing = [first for first, _ in queue(field, depth, paths=paths)._missing(2)]
    assert missing == list(range(other, 2 * START_GROUPS))


def test_a_worker_that_works_in_another_folder_finds_the_ledger_that_its_shard_waits_for(
    field: Field, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    paths = RunPaths(tmp_path / "runs" / "mine").create()
    monkeypatch.chdir(tmp_path)

    async def run() -> None:
        async with queue(field, 1, paths=RunPaths(Path("runs/mine"))) as rollouts:
            rollouts.play_ahead(1)
            await settled()

    scene(run)
    write_ledger(paths, 1, ROWS_SCHEMA.empty_table(), {})
    monkeypatch.chdir("/")
    assert all(each.after and each.after.exists() for each in field.begun if each.step == 2)
    assert {each.step for each in field.begun} == {1, 2}
