"""Rollouts in flight, as the training flow sees them: what both schedulers share.

`LockstepQueue` (pipeline.deterministic) plays exactly a step's own start groups. `BufferedQueue` keeps as many start groups in
flight as a controller allows, and a step takes whichever are ready. A queue also decides when the engines begin to serve a new
policy version, because that decides which version draws which rows.

Promise: a start-group number never stands for two positions, and a published start group is never played again (`play.py`).
"""

import asyncio
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from pipeline.controller import QueueTarget, StepObservation
from pipeline.play import RolloutReport
from pipeline.publisher import Publisher
from pipeline.resources import Resources
from pipeline.rollout_source import RolloutSource, Stretch
from pipeline.run_settings import PipelineSettings
from records.policy_version import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The rollouts of one step."""

    reports: tuple[RolloutReport, ...]
    """Reports that came in since the step before."""
    waited: tuple[float, float]
    """When the flow asked for the rollouts and when it had them, monotonic seconds."""
    ready_share: float
    """Share of what the step wanted that was ready when the flow asked; 1 where there was nothing to wait for."""
    queue: dict[str, float]
    """Registered `queue/` figures."""


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A stretch that is being played."""

    stretch: Stretch
    task: asyncio.Task[RolloutReport]
    began: float
    """Monotonic seconds."""
    version: int
    """Newest policy version when it began: its rows are of this version or newer ones."""
    passed_over: bool = False
    """It takes so long that another stretch was begun in its place."""


class RolloutQueue(ABC):
    """Keeps a source busy, gives each step its rollouts, and has the engines serve what was trained.

    Use it as an async context manager around the steps.
    """

    in_step: ClassVar[bool]
    """Whether a step waits for everything in flight."""

    def __init__(
        self, resources: Resources, source: RolloutSource, pipeline: PipelineSettings, last_step: int, *, step_done: int = 0
    ) -> None:
        """`step_done`: steps that are trained already."""
        self._resources, self._source, self._pipeline, self._last_step = resources, source, pipeline, last_step
        self._wanted = resources.rollouts.start_groups
        self._version = step_done
        self._publisher = Publisher(resources, self._on_served)
        self._in_flight: list[InFlight] = []
        self._reports: list[RolloutReport] = []
        self._counts = {"failed": 0, "passed_over": 0, "cancelled": 0}
        self._expired = -1  # of the whole run; -1 until a step asked
        self._expired_before = -1
        self.ready = 0
        """Start groups that the trainer could train on when it was last asked."""

    # -- what the flow calls, in this order ------------------------------------------------------------------------------

    async def take(self, step: int) -> StepRollouts:
        """Wait until `step` can be trained.

        Raises:
            Exception: what a rollout task failed with for good.
        """
        asked = time.monotonic()
        share = await self._collect(step)
        waited = (asked, time.monotonic())
        await self._publisher.release()
        reports, self._reports = tuple(self._reports), []
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        queue = {
            "queue/ahead": float(self.target.ahead),
            "queue/in_flight": float(sum(each.stretch.count for each in self._in_flight)),
            "queue/ready": float(self.ready),
            "queue/expired": float(self._expired - self._expired_before),
            **{f"queue/{name}": float(count) for name, count in counts.items()},
        }
        self._expired_before = self._expired
        return StepRollouts(reports=reports, waited=waited, ready_share=share, queue=queue)

    @abstractmethod
    def play_ahead(self, step: int) -> None:
        """Begin what may be played while `step` trains, if it is not in flight already."""

    @abstractmethod
    async def hand_over(self, published: PolicyVersion, *, at_once: bool) -> None:
        """Have the engines serve a version that was trained.

        Args:
            at_once: return only when the engines serve it, even if rollouts in flight must be waited for first.
        """

    @abstractmethod
    def learn(self, seen: StepObservation) -> QueueTarget:
        """Take in what a step showed; what is aimed at until the next step is done."""

    async def all_played(self) -> None:
        """Wait for everything in flight, without taking it."""
        await asyncio.gather(*(each.task for each in self._in_flight), return_exceptions=True)

    @property
    @abstractmethod
    def target(self) -> QueueTarget:
        """What is aimed at now."""

    # -- what the two schedulers implement -------------------------------------------------------------------------------

    @abstractmethod
    async def _collect(self, step: int) -> float:
        """Wait for the rollouts of `step`; the share of them that was ready at first. Fills `_reports`."""

    @abstractmethod
    async def _resume(self) -> None:
        """Go on where the run's files stand: serve the version that the next rollouts are to be drawn by."""

    def _on_served(self, version: int) -> None:
        """The engines serve `version` from now on."""
        self._version = version

    # -- shared ----------------------------------------------------------------------------------------------------------

    def _begin(self, stretch: Stretch) -> None:
        task = asyncio.create_task(self._source.play(stretch))
        self._in_flight.append(InFlight(stretch=stretch, task=task, began=time.monotonic(), version=self._version))

    async def __aenter__(self) -> Self:
        await self._resume()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Cancel what is in flight. Where the run ends well, the newest version is served: the scores are played by it."""
        try:
            await self._publisher.close(failed=kind is not None)
        finally:
            for each in self._in_flight:
                each.task.cancel()
            await asyncio.gather(*(each.task for each in self._in_flight), return_exceptions=True)
            self._in_flight.clear()
