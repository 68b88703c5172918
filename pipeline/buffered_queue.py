"""The scheduler of runs that are not in lockstep. A step takes the start groups that are ready.

The controller limits how many more are ready or in flight. A stretch that takes far longer than the others is a straggler:
another stretch is started in its place, and its rows are used if the staleness budget allows. If its rows would be too old, it is
cancelled and its start groups are played again. So the positions trained on do not depend on the length of their games. Several
failures in a row end the run.
"""

import asyncio
import statistics
import time
from collections import deque

from pipeline.controller import Bounds, Controller, QueueTarget, StepObservation
from pipeline.resources import Resources
from pipeline.rollout_queue import InFlight, RolloutQueue
from pipeline.rollout_source import RolloutSource
from pipeline.run_settings import PipelineSettings
from pipeline.stretches import GroupNumbers, groups_per_task
from records.policy_version import BASE, PolicyVersion
from telemetry.progress import reporter

BACKFILL_MAX = 1.0
"""Extra start groups per step, as a share of its own, that may replace those without spread, failed ones and stragglers."""
STRAGGLER_FACTOR = 3.0
"""A rollout task that takes this many times the median duration is a straggler."""
POLL_S = 1.0
"""Seconds between two checks for stragglers while a step waits."""
FAILURES_IN_A_ROW = 3
"""The run ends with the last error after this many failed stretches without a success between."""


class BufferedQueue(RolloutQueue):
    """Keeps start groups in flight for later steps."""

    in_step = False

    def __init__(
        self,
        resources: Resources,
        source: RolloutSource,
        pipeline: PipelineSettings,
        last_step: int,
        *,
        step_done: int = 0,
    ) -> None:
        super().__init__(resources, source, pipeline, last_step, step_done=step_done)
        self._controller = Controller(
            Bounds(
                start_groups=self._wanted,
                buffer_depth=pipeline.buffer_depth,
                max_policy_lag=resources.max_policy_lag,
            )
        )
        self._numbers = GroupNumbers(self._wanted)
        self._group_s: deque[float] = deque(maxlen=32)  # seconds per start group of the newest stretches
        self._credit: float = self._wanted * pipeline.buffer_depth  # start groups that may be started
        self._failures = 0  # in a row

    @property
    def target(self) -> QueueTarget:
        """The controller's current target."""
        return self._controller.target

    def learn(self, seen: StepObservation) -> QueueTarget:
        """See `RolloutQueue.learn`. A change is reported."""
        target = self._controller.after(seen)
        if target.reason:
            reporter().say(target.reason)
        return target

    def play_ahead(self, step: int) -> None:
        """Does nothing: stretches for later steps are always in flight."""

    async def hand_over(self, published: PolicyVersion, *, at_once: bool) -> None:
        """See `RolloutQueue.hand_over`. With a buffer depth of 0 it always returns when the version is served."""
        await self._publisher.publish(published, at_once=at_once or not self._pipeline.buffer_depth)

    async def _resume(self) -> None:
        newest = self._resources.resume_point.last.published
        if newest != BASE:
            await self._publisher.publish(newest, at_once=True)
        for sentence in await asyncio.to_thread(self._numbers.resume, self._resources.paths):
            reporter().say(f"set aside, to be played again: {sentence}")

    def _on_served(self, version: int) -> None:
        """Cancel stretches whose rows would be too old for the next step."""
        super()._on_served(version)
        for each in self._in_flight:
            if each.version < version - self._resources.max_policy_lag and not each.task.done():
                each.task.cancel()

    async def _collect(self, step: int) -> float:
        """Wait until enough start groups are ready for `step`. Returns the share that was ready on request."""
        self._add_credit(self._wanted * (1 + BACKFILL_MAX))
        self._collect_ended()
        await self._count_ready(step)
        at_first = min(1.0, self.ready / self._wanted)
        while True:
            self._fill(step)
            waited_for = [each for each in self._in_flight if not each.passed_over or self.ready == 0]
            if self.ready >= self._wanted or not waited_for:
                return at_first
            await asyncio.wait([each.task for each in waited_for], timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            if self._collect_ended():
                await self._count_ready(step)

    async def _count_ready(self, step: int) -> None:
        """Ask the trainer, which selects the rows, how many start groups are ready."""
        found = await asyncio.to_thread(self._resources.trainer.eligible, step, self._wanted)
        self.ready = found.start_groups
        self._expired_before = found.expired if self._expired_before < 0 else self._expired_before
        self._expired = found.expired

    def _add_credit(self, start_groups: float) -> None:
        """Allow more start groups to be started. Unused credit is kept, up to a limit."""
        most = self._wanted * (1 + BACKFILL_MAX + self._pipeline.buffer_depth)
        self._credit = min(self._credit + start_groups, most)

    def _missing(self, step: int) -> int:
        """Start groups to begin, so that those ready or in flight are enough for `step` and the target."""
        later_steps = self._wanted * max(0, self._last_step - step)
        wanted = self._wanted + min(self.target.ahead, later_steps)
        in_flight = sum(each.stretch.count for each in self._in_flight if not each.passed_over)
        return wanted - self.ready - in_flight

    def _fill(self, step: int) -> None:
        """Start stretches until the start groups ready or in flight are enough for the step and the target."""
        missing = self._missing(step)
        while (most := min(missing, int(self._credit))) > 0:
            stretch = self._numbers.next(min(self._task_size, most))
            self._begin(stretch)
            missing -= stretch.count
            self._credit -= stretch.count

    @property
    def _task_size(self) -> int:
        """Start groups per task."""
        measured = statistics.median(self._group_s) if self._group_s else None
        return groups_per_task(self._wanted, self._pipeline, measured)

    def _collect_ended(self) -> bool:
        """Process the stretches that ended. Returns whether any was published."""
        reports = len(self._reports)
        for each in [each for each in self._in_flight if each.task.done()]:
            self._in_flight.remove(each)
            self._settle(each)
        self._pass_over_stragglers()
        return len(self._reports) > reports

    def _settle(self, ended: InFlight) -> None:
        """Collect the report of a stretch that ended, or return its start groups to be played again.

        Raises:
            Exception: the error of the stretch, if too many failed in a row.
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
            self._add_credit(ended.stretch.count)

    def _pass_over_stragglers(self) -> None:
        """Mark stragglers and allow other start groups in their place."""
        if len(self._group_s) < 2:
            return
        median, now = statistics.median(self._group_s), time.monotonic()
        for each in self._in_flight:
            if not each.passed_over and now - each.began > STRAGGLER_FACTOR * median * each.stretch.count:
                each.passed_over = True
                self._counts["passed_over"] += 1
                self._add_credit(each.stretch.count)
