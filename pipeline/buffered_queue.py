"""The scheduler of runs that need not repeat: a step takes whichever start groups are ready, and as many more are ready or in
flight as the controller allows.

A stretch that takes far longer than others no longer counts as in flight, so another takes its place; what it brings is used if
the staleness budget allows. Once its rows would be too old for the budget it is cancelled, and its start groups are played anew:
which positions are trained on does not depend on how long their games take. Several failures in a row end the run.
"""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable

from pipeline.controller import Bounds, Controller, QueueTarget, StepObservation
from pipeline.resources import Resources
from pipeline.rollout_queue import InFlight, RolloutQueue
from pipeline.rollout_source import RolloutSource
from pipeline.run_settings import PipelineSettings
from pipeline.stretches import GroupNumbers, groups_per_task
from records.policy_version import BASE, PolicyVersion
from telemetry.progress import reporter

BACKFILL_MAX = 1.0
"""Start groups that may be played for a step in place of ones that taught nothing, failed or hang, as a share of its own."""
STRAGGLER_FACTOR = 3.0
"""Times its usual duration after which a rollout task is no longer waited for; what it brings late is used if it is fresh."""
LOOK_S = 1.0
"""Seconds between two looks at what other producers have published, and at stragglers, while a step waits."""
FAILURES_IN_A_ROW = 3
"""Stretches that failed for good, with no success between, after which the run ends with the last one's sentence."""


class BufferedQueue(RolloutQueue):
    """Keeps start groups in flight for the steps to come."""

    in_step = False

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
        """`elsewhere`: how many start groups rollout producers play now for the same run."""
        super().__init__(resources, source, pipeline, last_step, step_done=step_done)
        self._elsewhere = elsewhere
        self._controller = Controller(
            Bounds(
                start_groups=self._wanted,
                buffer_depth=pipeline.buffer_depth,
                max_policy_lag=resources.max_policy_lag,
                producers_min=pipeline.producers_min,
                producers_max=pipeline.producers_max,
            )
        )
        self._numbers = GroupNumbers(self._wanted, resources.rollouts.family)
        self._group_s: deque[float] = deque(maxlen=32)  # seconds per start group of the newest stretches
        self._credit: float = self._wanted * pipeline.buffer_depth  # start groups that may be begun
        self._full = False  # pipeline.ready_groups_max is reached
        self._failures = 0  # in a row

    @property
    def target(self) -> QueueTarget:
        """What the controller wants now."""
        return self._controller.target

    def learn(self, seen: StepObservation) -> QueueTarget:
        """See `RolloutQueue.learn`; a change is said once."""
        target = self._controller.after(seen)
        if target.reason:
            reporter().say(target.reason)
        return target

    def play_ahead(self, step: int) -> None:
        """Nothing to do: stretches for later steps are in flight all the time."""

    async def hand_over(self, published: PolicyVersion, *, at_once: bool) -> None:
        """See `RolloutQueue.hand_over`; with nothing ahead, the next rollouts wait for the version anyway."""
        await self._publisher.publish(published, at_once=at_once or not self._pipeline.buffer_depth)

    async def _resume(self) -> None:
        newest = self._resources.resume_point.last.published
        if newest != BASE:
            await self._publisher.publish(newest, at_once=True)
        for sentence in await asyncio.to_thread(self._numbers.resume, self._resources.paths):
            reporter().say(f"set aside, to be played again: {sentence}")

    def _on_served(self, version: int) -> None:
        """Cancel what can only bring rows that are too old for the next step."""
        super()._on_served(version)
        for each in self._in_flight:
            if each.version < version - self._resources.max_policy_lag and not each.task.done():
                each.task.cancel()

    async def _collect(self, step: int) -> float:
        """Wait until the trainer finds enough for `step`; the share of it that was ready at first."""
        self._earn(self._wanted * (1 + BACKFILL_MAX))
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
                with self._resources.spans.span("rollout"):  # producers elsewhere play
                    await asyncio.sleep(LOOK_S)
            if self._take_in() or self.target.producers > 0 or self._elsewhere():
                await self._ask(step)

    async def _ask(self, step: int) -> None:
        """Ask the trainer how much is ready: it will choose the rows."""
        found = await asyncio.to_thread(self._resources.trainer.eligible, step, self._wanted)
        self.ready = found.start_groups
        self._expired_before = found.expired if self._expired_before < 0 else self._expired_before
        self._expired = found.expired
        self._full = 0 < self._pipeline.ready_groups_max <= found.advantage_groups

    def _earn(self, start_groups: float) -> None:
        """So many more may be begun; credit that is not spent is kept, up to a bound."""
        most = self._wanted * (1 + BACKFILL_MAX + self._pipeline.buffer_depth)
        self._credit = min(self._credit + start_groups, most)

    def _fill(self, step: int) -> None:
        """Begin stretches until as many start groups are ready or in flight as the step and the target want."""
        coming = self._wanted * (self._last_step - step)
        wanted = self._wanted + (0 if self._full else min(self.target.ahead, coming))
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

    def _take_in(self) -> bool:
        """Take in whatever ended; whether anything was published."""
        reports = len(self._reports)
        for each in [each for each in self._in_flight if each.task.done()]:
            self._in_flight.remove(each)
            self._settle(each)
        self._pass_over_stragglers()
        return len(self._reports) > reports

    def _settle(self, ended: InFlight) -> None:
        """Take in what a stretch brought, or have it played again.

        Raises:
            Exception: what it failed with, if several failed with no success between.
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
            self._reports.append(report)
            if report.seconds > 0:
                self._group_s.append(report.seconds / report.start_groups)

    def _play_again(self, ended: InFlight) -> None:
        self._numbers.give_back(ended.stretch)
        if not ended.passed_over:
            self._earn(ended.stretch.count)

    def _pass_over_stragglers(self) -> None:
        """Stop counting on what takes far longer than others did."""
        if len(self._group_s) < 2:
            return
        usual, now = statistics.median(self._group_s), time.monotonic()
        for each in self._in_flight:
            if not each.passed_over and now - each.began > STRAGGLER_FACTOR * usual * each.stretch.count:
                each.passed_over = True
                self._counts["passed_over"] += 1
                self._earn(each.stretch.count)
