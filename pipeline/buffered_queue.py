"""The scheduler of runs that are not in lockstep. A step takes the start groups that are ready.

The controller limits how many more are ready or in flight. A stretch that takes far longer than the others is a straggler:
another stretch is started in its place, and its rows are used if the staleness budget allows. If its rows would be too old, it is
cancelled and its start groups are played again. So the positions trained on do not depend on the length of their games. Several
failures in a row end the run.
"""

import asyncio
import math
import statistics
import time
from collections import deque

from pipeline.controller import Bounds, Controller, QueueTarget, StepObservation
from pipeline.play_elsewhere import Fleet, NoFleet, SharedPlay
from pipeline.producer_rule import Sighting
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
"""Seconds between two checks for stragglers and for shards of other producers, while a step waits."""
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
        fleet: Fleet | None = None,
    ) -> None:
        """`fleet`: the rollout producers that play for the same run."""
        super().__init__(resources, source, pipeline, last_step, step_done=step_done)
        self._fleet = fleet or NoFleet()
        self._plays_here = pipeline.task_runner != "producers"
        self._shared = SharedPlay(
            resources.control,
            self._fleet,
            start_groups=self._wanted,
            most=math.ceil(self._wanted * (1 + BACKFILL_MAX)),
            plays_here=self._plays_here,
        )
        self._trained = 0  # start groups that steps took
        self._unserved: PolicyVersion | None = None  # newest version, if the flow's own engine does not serve it
        self._controller = Controller(
            Bounds(
                start_groups=self._wanted,
                buffer_depth=pipeline.buffer_depth,
                max_policy_lag=resources.max_policy_lag,
                producers_min=pipeline.producers_min,
                producers_max=pipeline.producers_max,
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
        """See `RolloutQueue.learn`. A change is reported, and the fleet is told."""
        self._trained += seen.trained
        self._watch(waiting=False, surplus=seen.ready >= self._wanted)
        target = self._controller.after(seen)
        if target.reason:
            reporter().say(target.reason)
        return target

    def _watch(self, *, waiting: bool, surplus: bool = False) -> None:
        """Let the controller look at the clock and the producers."""
        now, status = time.monotonic(), self._fleet.status()
        seen = Sighting(now=now, waiting=waiting, trained=self._trained, surplus=surplus, fleet=status)
        before = self.target.producers
        target = self._controller.watch(seen)
        if target.reason:
            reporter().say(target.reason)
        if target.producers != before:
            self._fleet.set_target(target.producers)

    def play_ahead(self, step: int) -> None:
        """Does nothing: stretches for later steps are always in flight."""

    async def hand_over(self, published: PolicyVersion, *, at_once: bool) -> None:
        """See `RolloutQueue.hand_over`. With a buffer depth of 0 it always returns when the version is served.

        Where the flow plays nothing, its engine is only for scores and gets a version `at_once` or at the end.
        """
        left = self.ready - self._wanted  # of what was ready before the step
        self._shared.next_version(self._missing(published.version + 1, left), left)
        if self._plays_here or at_once:
            self._unserved = None
            await self._publisher.publish(published, at_once=at_once or not self._pipeline.buffer_depth)
        else:
            self._unserved = published
            await self._resources.announce(published)
            self._on_served(published.version)

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None and self._unserved is not None:
            await self._publisher.publish(self._unserved, at_once=True)
        await super().__aexit__(kind, *rest)

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
        self._watch(waiting=False)
        self._collect_ended()
        await self._count_ready(step)
        at_first = min(1.0, self.ready / self._wanted)
        while True:
            self._fill(step)
            waited_for = [each for each in self._in_flight if not each.passed_over or self.ready == 0]
            if self.ready >= self._wanted or not (waited_for or self._shared.may_bring_more()):
                self._watch(waiting=at_first < 1)
                return at_first
            await self._shared.step_waits(self._missing(step, self.ready))
            if waited_for:
                await asyncio.wait([each.task for each in waited_for], timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                with self._resources.spans.span("rollout"):  # only producers elsewhere play
                    await asyncio.sleep(POLL_S)
            self._watch(waiting=True)
            if self._collect_ended() or self.target.producers > 0 or self._shared.is_played:
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

    def _missing(self, step: int, ready: int) -> int:
        """Start groups to begin, here or elsewhere, so that those ready or in flight are enough for `step` and the target."""
        later_steps = self._wanted * max(0, self._last_step - step)
        wanted = self._wanted + min(self.target.ahead, later_steps)
        here = sum(each.stretch.count for each in self._in_flight if not each.passed_over)
        return (wanted if step <= self._last_step else 0) - ready - here - self._fleet.status().in_flight

    def _fill(self, step: int) -> None:
        """Start stretches until the start groups ready or in flight are enough for the step and the target."""
        if not self._plays_here:
            return
        missing = self._missing(step, self.ready)
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
