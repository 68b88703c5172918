"""The scheduler of runs in lockstep: each step trains on exactly its own start groups.

With `pipeline.buffer_depth` 0, rollouts and training alternate. With 1 they overlap: while a step trains, the version before it
plays all start groups of the next step. These are published only after the current step has selected its rows. So two CPU runs
with one seed are equal, if their games are played on the engine's event loop. A task that fails after its retries ends the run.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from pipeline.controller import QueueTarget, StepObservation
from pipeline.play import report_of
from pipeline.resources import PRODUCER
from pipeline.rollout_queue import RolloutQueue
from pipeline.rollout_source import Stretch
from pipeline.stretches import groups_per_task
from records.policy_version import BASE, PolicyVersion
from storage.adapters import read_adapter
from storage.ledger import ledger_path
from storage.shards import Coverage, coverage
from telemetry.errors import DataError
from telemetry.progress import reporter


class LockstepQueue(RolloutQueue):
    """Plays all start groups of a step before the step trains."""

    in_step = True
    _begun = 0  # newest step whose start groups were started

    @property
    def _overlapped(self) -> bool:
        """Whether the rollouts of a step are played while the previous step trains."""
        return self._pipeline.buffer_depth > 0

    @property
    def target(self) -> QueueTarget:
        """Constant: a step plays its own start groups and no others."""
        return QueueTarget(ahead=self._wanted * self._pipeline.buffer_depth, reason="")

    def learn(self, seen: StepObservation) -> QueueTarget:
        """See `RolloutQueue.learn`. Observations have no effect."""
        return self.target

    def play_ahead(self, step: int) -> None:
        """If overlapped, start the rollouts of the step after `step` under the version that is served now."""
        if self._overlapped and step < self._last_step:
            chosen = ledger_path(self._resources.paths, step)
            for stretch in self._missing(step + 1):
                self._begin(replace(stretch, after=chosen))
            self._begun = step + 1

    async def hand_over(self, published: PolicyVersion, *, at_once: bool) -> None:
        """See `RolloutQueue.hand_over`. If overlapped, the version is held until the previous version's rollouts have ended."""
        if not self._overlapped:
            await self._publisher.publish(published, at_once=True)
            return
        self._publisher.hold(published)
        if at_once:
            await self.all_played()
            await self._publisher.release()

    async def _resume(self) -> None:
        newest = self._resources.resume_point.last.published
        if newest == BASE:
            return
        if self._overlapped and newest.version == 1:
            self._publisher.hold(newest)  # the engines start with the base model, the version before
            return
        if self._overlapped:
            try:
                before = await asyncio.to_thread(read_adapter, self._resources.paths, newest.version - 1)
            except DataError as error:
                reporter().say(
                    f"the rollouts of step {newest.version + 1} are drawn by version {newest.version} instead of the version "
                    f"before it: {error}"
                )
            else:
                await self._resources.serve(before)
                self._publisher.hold(newest)
                return
        await self._publisher.publish(newest, at_once=True)

    async def _collect(self, step: int) -> float:
        """Play the missing start groups of the step, and wait for all."""
        if self._begun < step:
            for stretch in self._missing(step):
                self._begin(stretch)
            self._begun = step
        ready = sum(each.stretch.count for each in self._in_flight if each.task.done())
        wanted = sum(each.stretch.count for each in self._in_flight)
        self._reports += await asyncio.gather(*(each.task for each in self._in_flight))
        self._in_flight.clear()
        return ready / wanted if wanted else 1.0

    def _missing(self, step: int) -> Iterable[Stretch]:
        """Stretches of the step that no shard contains: all of them, except in a resumed run."""
        if ledger_path(self._resources.paths, step).exists():
            return []  # the rows are selected already, and the trainer will use exactly these
        first = (step - 1) * self._wanted
        published = coverage(self._resources.paths, PRODUCER, first, self._wanted)
        self._note_published(published)
        task_size = groups_per_task(self._wanted, self._pipeline, None)
        return [
            Stretch(first + offset, min(task_size, count - offset), step)
            for first, count in published.missing
            for offset in range(0, count, task_size)
        ]

    def _note_published(self, published: Coverage) -> None:
        for sentence in published.set_aside:
            reporter().say(f"set aside, to be played again: {sentence}")
        if published.published or published.set_aside:
            missing = sum(count for _, count in published.missing)
            self._reports.append(report_of(published, self._wanted - missing, self._resources.tokens.thinking))
