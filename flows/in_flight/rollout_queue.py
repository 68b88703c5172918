"""Start groups in flight: handed out in order, taken by whichever step finds enough ready, replaced where they hang or fail.

Two ways, by the settings. In step (`pipeline.deterministic`): a step's own start groups are all played, then trained on; a task
that fails for good ends the run. They may be played while the step before trains, and are then published once it has chosen its
rows. In flow: the step at hand begins as soon as the trainer finds as many start groups that it may
train on as it wants, whichever those are, while as many more as the controller allows are ready or in flight. A stretch that
takes far longer than others no longer counts as in flight, so another takes its place; what it brings is used if it still may be.
Once the budget says that its rows would be too old it is cancelled, and its start groups are played anew: which positions are
trained on does not depend on how long their games take.

Promise: a number is never given to two positions, and a published one is never played again (`tasks/rollouts.py`).
"""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Self

from flows.in_flight.controller import Bounds, Controller, Plan, Seen
from flows.in_flight.stretches import Numbers, groups_per_task
from flows.run_settings import PipelineSettings
from storage.follow import LOOKAHEAD
from storage.ledger import ledger_path
from storage.shards import Coverage, coverage
from tasks.resources import PRODUCER, Resources
from tasks.rollout_source import RolloutSource, Stretch
from tasks.rollouts import RolloutReport, report_of
from telemetry.progress import reporter

LOOK_S = 1.0
"""Seconds between two looks at what other producers have published, and at stragglers, while a step waits."""
FAILURES_IN_A_ROW = 3
"""Stretches that failed for good with none that succeeded between, after which the run ends with the last one's sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The rollouts of one step."""

    reports: tuple[RolloutReport, ...]
    """Those that came in since the step before."""
    waited: tuple[float, float]
    """When the flow asked for them and when it had them, monotonic seconds."""
    ready_share: float
    """Share of what the step wanted that was there when the flow asked; 1 where there was nothing to wait for."""
    queue: dict[str, float]
    """Registered `queue/` figures."""


@dataclass(slots=True, kw_only=True)
class _InFlight:
    """A stretch that is being played."""

    stretch: Stretch
    task: asyncio.Task[RolloutReport]
    began: float
    version: int
    """Newest policy version when it began: its rows are of this one or newer ones."""
    passed_over: bool = False
    """It takes so long that another was begun in its place."""


class RolloutQueue:
    """Keeps a source busy, and hands what it brought to the steps."""

    def __init__(
        self,
        resources: Resources,
        source: RolloutSource,
        pipeline: PipelineSettings,
        last_step: int,
        *,
        step_done: int = 0,
        elsewhere: Callable[[], int] = lambda: 0,
    ) -> None:
        """
        Args:
            step_done: steps that are trained already.
            elsewhere: says how many start groups rollout producers play now, for the same run.
        """
        self._resources, self._source, self._pipeline, self._elsewhere = resources, source, pipeline, elsewhere
        self._last_step = last_step
        self._wanted = resources.rollouts.start_groups
        self._in_step = pipeline.deterministic
        self._controller = Controller(
            Bounds(
                start_groups=self._wanted,
                buffer_depth=pipeline.buffer_depth,
                max_policy_lag=resources.max_policy_lag,
                producers_min=pipeline.producers_min,
                producers_max=pipeline.producers_max,
            )
        )
        self._numbers = Numbers(self._wanted, resources.rollouts.family)
        self._in_flight: list[_InFlight] = []
        self._came_in: list[RolloutReport] = []
        self._group_s: deque[float] = deque(maxlen=32)  # of the newest stretches
        self._version = step_done
        self._credit: float = self._wanted * pipeline.buffer_depth  # start groups that may be begun
        self._full = False  # pipeline.ready_groups_max is reached
        self._failures = 0  # in a row
        self._counts = {"failed": 0, "passed_over": 0, "cancelled": 0}
        self._paused_at = -1
        self._begun = 0  # in step: the newest step whose start groups were begun
        self._expired = -1  # of the whole run
        self._expired_before = -1  # -1 until a step asked
        self.ready = 0
        """Start groups that the trainer could train on when it was last asked."""

    @property
    def plan(self) -> Plan:
        """What the controller wants now."""
        return self._controller.plan

    async def take(self, step: int) -> StepRollouts:
        """Wait until `step` can be trained, and leave as many start groups in flight as may be ahead of it.

        Raises:
            Exception: whatever a stretch failed with for good, in step; or the last of several in a row.
        """
        asked = time.monotonic()
        share = await (self._all_of(step) if self._in_step else self._enough_for(step))
        reports, self._came_in = tuple(self._came_in), []
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        queue = {
            "queue/ahead": float(self.plan.ahead),
            "queue/in_flight": float(sum(each.stretch.count for each in self._in_flight)),
            "queue/ready": float(self.ready),
            "queue/expired": float(self._expired - self._expired_before),
            **{f"queue/{name}": float(count) for name, count in counts.items()},
        }
        self._expired_before = self._expired
        return StepRollouts(reports=reports, waited=(asked, time.monotonic()), ready_share=share, queue=queue)

    def play_ahead(self, step: int) -> None:
        """In step, and overlapped: begin what the step after `step` trains on, by the version that is served now."""
        if self._pipeline.one_behind and step < self._last_step:
            chosen = ledger_path(self._resources.paths, self._resources.standing.lineage, step)
            for stretch in self._missing(step + 1):
                self._begin(replace(stretch, after=chosen))
            self._begun = step + 1

    def published(self, version: int) -> None:
        """The engine plays `version` from now on: what can only bring rows that are too old for the next step is given up."""
        self._version = version
        for each in self._in_flight:
            if each.version < version - self._resources.max_policy_lag and not each.task.done():
                each.task.cancel()

    def learn(self, seen: Seen) -> Plan:
        """What a step showed; the plan until the next is done, said aloud where something moved."""
        plan = self._controller.after(seen)
        if plan.reason:
            reporter().say(plan.reason)
        return plan

    async def all_played(self) -> None:
        """Wait for everything in flight, without taking it."""
        await asyncio.gather(*(each.task for each in self._in_flight), return_exceptions=True)

    async def __aenter__(self) -> Self:
        if not self._in_step:
            found = await asyncio.to_thread(self._numbers.resume, self._resources.paths)
            for sentence in found:
                reporter().say(f"set aside, to be played again: {sentence}")
        return self

    async def __aexit__(self, *_: object) -> None:
        """End whatever is still in flight, whatever happened."""
        for each in self._in_flight:
            each.task.cancel()
        await asyncio.gather(*(each.task for each in self._in_flight), return_exceptions=True)
        self._in_flight.clear()

    # -- in flow ---------------------------------------------------------------------------------------------------------

    async def _enough_for(self, step: int) -> float:
        """Wait until the trainer finds enough for `step`; the share of it that was there at first."""
        self._earn(self._wanted * (1 + self._pipeline.backfill_max))
        self._take_in()
        await self._ask(step)
        at_first = min(1.0, self.ready / self._wanted)
        while True:
            self._fill(step)
            waited_for = [each for each in self._in_flight if not each.passed_over or self.ready == 0]
            if self.ready >= self._wanted or not (waited_for or self._elsewhere()):
                return at_first
            if waited_for:
                await asyncio.wait([each.task for each in waited_for], timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                with self._resources.spans.span("rollout"):  # elsewhere
                    await asyncio.sleep(LOOK_S)
            if self._take_in() or self.plan.producers > 0 or self._elsewhere():
                await self._ask(step)

    async def _ask(self, step: int) -> None:
        """How much is ready, from the one who will choose: the trainer."""
        found = await asyncio.to_thread(self._resources.trainer.eligible, step, self._wanted)
        self.ready = found.start_groups
        self._expired_before = found.expired if self._expired_before < 0 else self._expired_before
        self._expired = found.expired
        self._full = 0 < self._pipeline.ready_groups_max <= found.advantage_groups

    def _earn(self, start_groups: float) -> None:
        """So many more may be begun; what is not spent is kept for a while."""
        most = self._wanted * (1 + self._pipeline.backfill_max + self._pipeline.buffer_depth)
        self._credit = min(self._credit + start_groups, most)

    def _fill(self, step: int) -> None:
        """Begin stretches until as many start groups are ready or in flight as the step and the plan want."""
        coming = self._wanted * (self._last_step - step)
        wanted = self._wanted + (0 if self._full else min(self.plan.ahead, coming))
        busy = self._elsewhere() + sum(each.stretch.count for each in self._in_flight if not each.passed_over)
        while (most := min(wanted - self.ready - busy, int(self._credit))) > 0:
            stretch = self._numbers.next(min(self._each, max(self._resources.rollouts.family, most)))
            self._begin(stretch)
            busy += stretch.count
            self._credit -= stretch.count

    @property
    def _each(self) -> int:
        """Start groups that a task takes: whole families."""
        family = self._resources.rollouts.family
        measured = statistics.median(self._group_s) if self._group_s else None
        return -(-groups_per_task(self._wanted, self._pipeline, measured) // family) * family

    def _begin(self, stretch: Stretch) -> None:
        task = asyncio.create_task(self._source.play(stretch))
        self._in_flight.append(_InFlight(stretch=stretch, task=task, began=time.monotonic(), version=self._version))

    def _take_in(self) -> bool:
        """Whatever ended; whether anything was published."""
        reports = len(self._came_in)
        for each in [each for each in self._in_flight if each.task.done()]:
            self._in_flight.remove(each)
            self._settle(each)
        self._pass_over_stragglers()
        return len(self._came_in) > reports

    def _settle(self, ended: _InFlight) -> None:
        """Take in what a stretch brought, or have it played again.

        Raises:
            Exception: what it failed with, if several failed and none succeeded between.
        """
        if ended.task.cancelled():
            self._counts["cancelled"] += 1
            self._play_again(ended)
        elif (error := ended.task.exception()) is not None:
            self._counts["failed"] += 1
            self._failures += 1
            if self._failures >= FAILURES_IN_A_ROW:
                raise error
            reporter().say(f"start groups from {ended.stretch.first_group} failed and are played again: {error}")
            self._play_again(ended)
        else:
            self._failures = 0
            report = ended.task.result()
            self._came_in.append(report)
            if report.seconds > 0:
                self._group_s.append(report.seconds / report.start_groups)

    def _play_again(self, ended: _InFlight) -> None:
        self._numbers.give_back(ended.stretch)
        if not ended.passed_over:
            self._earn(ended.stretch.count)

    def _pass_over_stragglers(self) -> None:
        """Count no longer on what takes far longer than others did."""
        if len(self._group_s) < 2:
            return
        usual, now = statistics.median(self._group_s), time.monotonic()
        for each in self._in_flight:
            if not each.passed_over and now - each.began > self._pipeline.straggler_factor * usual * each.stretch.count:
                each.passed_over = True
                self._counts["passed_over"] += 1
                self._earn(each.stretch.count)

    # -- in step ---------------------------------------------------------------------------------------------------------

    async def _all_of(self, step: int) -> float:
        """Play what is missing of the step's own start groups, unless enough lies ready; all of it is waited for."""
        if self._may_pause(step) and await self._is_full(step):
            reporter().say(f"step {step} plays nothing: enough advantage groups lie ready")
            self._paused_at = step
            return 1.0
        if self._begun < step:
            for stretch in self._missing(step):
                self._begin(stretch)
            self._begun = step
        at_first = [each.stretch.count * each.task.done() for each in self._in_flight]
        wanted = sum(each.stretch.count for each in self._in_flight)
        self._came_in += await asyncio.gather(*(each.task for each in self._in_flight))
        self._in_flight.clear()
        return sum(at_first) / wanted if wanted else 1.0

    def _may_pause(self, step: int) -> bool:
        """Not in two steps running, nor over more numbers than an index looks ahead: it would find what comes after late."""
        return self._pipeline.ready_groups_max > 0 and self._paused_at != step - 1 and self._wanted < LOOKAHEAD

    async def _is_full(self, step: int) -> bool:
        found = await asyncio.to_thread(self._resources.trainer.eligible, step, self._wanted)
        self.ready = found.start_groups
        return found.advantage_groups >= self._pipeline.ready_groups_max

    def _missing(self, step: int) -> Iterable[Stretch]:
        """Stretches of the step that no shard holds: all of them, but for a run that is resumed."""
        if ledger_path(self._resources.paths, self._resources.standing.lineage, step).exists():
            return []  # its rows were chosen already, and the trainer will ask for these very ones
        published = coverage(self._resources.paths, PRODUCER, (step - 1) * self._wanted, self._wanted)
        self._note_what_stands(published)
        return [
            Stretch(first + offset, min(self._each, count - offset), step)
            for first, count in published.missing
            for offset in range(0, count, self._each)
        ]

    def _note_what_stands(self, published: Coverage) -> None:
        for sentence in published.set_aside:
            reporter().say(f"set aside, to be played again: {sentence}")
        if published.published or published.set_aside:
            missing = sum(count for _, count in published.missing)
            self._came_in.append(report_of(published, self._wanted - missing))
