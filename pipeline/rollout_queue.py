"""Plays the start groups of a run's steps, at most `pipeline.buffer_depth` steps ahead of the step that trains.

    depth   while step s trains                      a step begins when
    0       nothing is played                        all its own start groups are played
    1       those of step s + 1, by version s - 1    all its own start groups are played
    2..     those of the steps to s + depth          as many as it takes are ready, whichever steps they were played for

With a depth of 0 or 1 nothing is decided by measured time, so two CPU runs with one seed are equal. For this, with a depth of 1,
what is played ahead is published only after the step that trains has chosen its rows, and a new version is served only between
two steps' rollouts. A task that fails after its retries ends the run.

A start-group number always means the same position. A published start group is never played again (`play.py`).
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from pipeline.play import RolloutReport, report_of
from pipeline.publisher import Publisher
from pipeline.resources import PRODUCER, Resources
from pipeline.rollout_source import RolloutSource, Stretch
from records.policy_version import BASE, PolicyVersion
from storage.adapters import read_adapter
from storage.ledger import ledger_path
from storage.shards import Coverage, coverage
from telemetry.errors import DataError
from telemetry.progress import reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The rollouts of one step."""

    reports: tuple[RolloutReport, ...]
    """Reports received since the previous step."""
    waited: tuple[float, float]
    """When the flow requested the rollouts and when it received them, monotonic seconds."""
    ready_share: float
    """Share of the step's own start groups that were played on request."""
    queue: dict[str, float]
    """Registered `queue/` metrics."""


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A stretch that is being played."""

    stretch: Stretch
    task: asyncio.Task[RolloutReport]


class RolloutQueue:
    """Starts rollouts, collects them for each step, and publishes trained versions to the engines.

    Use it as an async context manager around the steps.
    """

    def __init__(self, resources: Resources, source: RolloutSource, depth: int, last_step: int, *, step_done: int = 0) -> None:
        """
        Args:
            depth: steps that are played ahead.
            step_done: number of steps already trained.
        """
        self._resources, self._source, self._depth, self._last_step = resources, source, depth, last_step
        self._wanted = resources.rollouts.start_groups
        self._begun = step_done
        """The newest step whose start groups were started."""
        self._publisher = Publisher(resources)
        self._in_flight: list[InFlight] = []
        self._reports: list[RolloutReport] = []
        self._ready = 0
        self._expired: int | None = None  # total of the run; None before the first request to the trainer

    @property
    def in_step(self) -> bool:
        """Whether each step trains on exactly its own start groups."""
        return self._depth <= 1

    # -- what the flow calls, in this order ------------------------------------------------------------------------------

    async def take(self, step: int) -> StepRollouts:
        """Wait until `step` can be trained.

        Raises:
            Exception: the error of a rollout task that failed after its retries.
        """
        asked = time.monotonic()
        self._begin_steps(step)
        missing = sum(each.stretch.count for each in self._own(step) if not each.task.done())
        expired = await self._collect(step)
        waited = (asked, time.monotonic())
        await self._publisher.release()
        reports, self._reports = tuple(self._reports), []
        queue = {
            "queue/in_flight": float(sum(each.stretch.count for each in self._in_flight)),
            "queue/ready": float(self._ready),
            "queue/expired": float(expired),
        }
        return StepRollouts(reports=reports, waited=waited, ready_share=1 - missing / self._wanted, queue=queue)

    def play_ahead(self, step: int) -> None:
        """Start what is played while `step` trains."""
        self._begin_steps(min(step + self._depth, self._last_step), while_training=step)

    async def hand_over(self, published: PolicyVersion, *, at_once: bool) -> None:
        """Publish a trained version to the engines; with a depth of 1 when the rollouts of the version before have ended.

        Args:
            at_once: return only when the engines serve it, even if rollouts in flight must end first.
        """
        if self._depth != 1:
            await self._publisher.publish(published, at_once=at_once or not self._depth)
            return
        self._publisher.hold(published)
        if at_once:
            await self.all_played()
            await self._publisher.release()

    async def all_played(self) -> None:
        """Wait until everything in flight has ended."""
        await asyncio.gather(*(each.task for each in self._in_flight), return_exceptions=True)

    # -- starting and collecting -----------------------------------------------------------------------------------------

    def _begin_steps(self, last: int, while_training: int | None = None) -> None:
        """Start the start groups of all steps up to `last` that were not started yet."""
        held = None
        if self.in_step and while_training is not None:
            held = ledger_path(self._resources.paths, while_training)
        while self._begun < last:
            self._begun += 1
            for first, count in self._missing(self._begun):
                stretch = Stretch(first_group=first, count=count, step=self._begun, after=held)
                self._in_flight.append(InFlight(stretch=stretch, task=asyncio.create_task(self._source.play(stretch))))

    def _missing(self, step: int) -> Iterable[tuple[int, int]]:
        """First number and count of each task of a step, of what no shard contains: all, except in a resumed run."""
        if ledger_path(self._resources.paths, step).exists():
            return []  # the rows are selected already, and the trainer will use exactly these
        found = coverage(self._resources.paths, PRODUCER, (step - 1) * self._wanted, self._wanted)
        self._note_published(found)
        size = self._source.groups_per_task
        return [(first + offset, min(size, count - offset)) for first, count in found.missing for offset in range(0, count, size)]

    def _note_published(self, found: Coverage) -> None:
        for sentence in found.set_aside:
            reporter().say(f"set aside, to be played again: {sentence}")
        if found.published or found.set_aside:
            missing = sum(count for _, count in found.missing)
            self._reports.append(report_of(found, self._wanted - missing, self._resources.tokens.thinking))

    def _own(self, step: int) -> list[InFlight]:
        """What is in flight of the start groups of `step` and of steps before."""
        return [each for each in self._in_flight if each.stretch.step <= step]

    async def _collect(self, step: int) -> int:
        """Wait for the rollouts of `step`. Returns the advantage groups that became too old since the step before."""
        before = self._expired
        while True:
            self._take_reports()
            enough = not self.in_step and await self._count_ready(step)
            if enough or not self._own(step):
                return 0 if before is None or self._expired is None else self._expired - before
            await asyncio.wait([each.task for each in self._in_flight], return_when=asyncio.FIRST_COMPLETED)

    def _take_reports(self) -> None:
        """Collect the reports of what has ended.

        Raises:
            Exception: the error of a task that failed.
        """
        for each in [each for each in self._in_flight if each.task.done()]:
            self._in_flight.remove(each)
            self._reports.append(each.task.result())

    async def _count_ready(self, step: int) -> bool:
        """Ask the trainer, which selects the rows, whether as many start groups are ready as a step takes."""
        found = await asyncio.to_thread(self._resources.trainer.eligible, step, self._wanted)
        self._ready, self._expired = found.start_groups, found.expired
        return self._ready >= self._wanted

    # -- opening and closing ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        newest = self._resources.resume_point.last.published
        if newest == BASE:
            return self
        if self._depth == 1 and await self._serve_the_one_before(newest):
            self._publisher.hold(newest)
        else:
            await self._publisher.publish(newest, at_once=True)
        return self

    async def _serve_the_one_before(self, newest: PolicyVersion) -> bool:
        """Serve the version that would have played the next step's start groups. Returns False if it is gone."""
        if newest.version > 1:  # the engines start with the base model, version 0
            try:
                before = await asyncio.to_thread(read_adapter, self._resources.paths, newest.version - 1)
            except DataError as error:
                reporter().say(
                    f"the rollouts of step {newest.version + 1} are drawn by version {newest.version} instead of the version "
                    f"before it: {error}"
                )
                return False
            await self._resources.serve(before)
        return True

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Cancel what is in flight. After a success the newest version is served, because it plays the scores."""
        try:
            await self._publisher.close(failed=kind is not None)
        finally:
            for each in self._in_flight:
                each.task.cancel()
            await asyncio.gather(*(each.task for each in self._in_flight), return_exceptions=True)
            self._in_flight.clear()
