"""The interface and the shared parts of the two rollout schedulers.

`LockstepQueue` (pipeline.lockstep) plays exactly the start groups of a step. `BufferedQueue` keeps as many start groups in
flight as a controller allows, and a step takes those that are ready. A queue also decides when the engines serve a new policy
version, because this determines which version draws which rows.

A start-group number always means the same position. A published start group is never played again (`play.py`).
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
    """Reports received since the previous step."""
    waited: tuple[float, float]
    """When the flow requested the rollouts and when it received them, monotonic seconds."""
    ready_share: float
    """Share of the step's start groups that were ready on request; 1 if none were needed."""
    queue: dict[str, float]
    """Registered `queue/` metrics."""


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A stretch that is being played."""

    stretch: Stretch
    task: asyncio.Task[RolloutReport]
    began: float
    """Monotonic seconds."""
    version: int
    """Newest policy version at the start; its rows have this version or newer ones."""
    passed_over: bool = False
    """It is a straggler, and another stretch may be started in its place."""


class RolloutQueue(ABC):
    """Starts rollouts, collects them for each step, and publishes trained versions to the engines.

    Use it as an async context manager around the steps.
    """

    in_step: ClassVar[bool]
    """Whether a step waits for all start groups in flight."""

    def __init__(
        self, resources: Resources, source: RolloutSource, pipeline: PipelineSettings, last_step: int, *, step_done: int = 0
    ) -> None:
        """`step_done`: number of steps already trained."""
        self._resources, self._source, self._pipeline, self._last_step = resources, source, pipeline, last_step
        self._wanted = resources.rollouts.start_groups
        self._version = step_done
        self._publisher = Publisher(resources, self._on_served)
        self._in_flight: list[InFlight] = []
        self._reports: list[RolloutReport] = []
        self._counts = {"failed": 0, "passed_over": 0, "cancelled": 0}
        self._expired = -1  # total of the run; -1 before the first request to the trainer
        self._expired_before = -1
        self.ready = 0
        """Start groups that were ready to train on at the last request to the trainer."""

    # -- what the flow calls, in this order ------------------------------------------------------------------------------

    async def take(self, step: int) -> StepRollouts:
        """Wait until `step` can be trained.

        Raises:
            Exception: the error of a rollout task that failed after its retries.
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
        """Start what may be played while `step` trains."""

    @abstractmethod
    async def hand_over(self, published: PolicyVersion, *, at_once: bool) -> None:
        """Publish a trained version to the engines.

        Args:
            at_once: return only when the engines serve it, even if rollouts in flight must end first.
        """

    @abstractmethod
    def learn(self, seen: StepObservation) -> QueueTarget:
        """Take in the observation of a step. Returns the target until the next one is done."""

    async def all_played(self) -> None:
        """Wait until everything in flight has ended."""
        await asyncio.gather(*(each.task for each in self._in_flight), return_exceptions=True)

    @property
    @abstractmethod
    def target(self) -> QueueTarget:
        """The current target."""

    # -- what the two schedulers implement -------------------------------------------------------------------------------

    @abstractmethod
    async def _collect(self, step: int) -> float:
        """Wait for the rollouts of `step` and fill `_reports`. Returns the share that was ready on request."""

    @abstractmethod
    async def _resume(self) -> None:
        """Continue from the run's files: serve the version for the next rollouts."""

    def _on_served(self, version: int) -> None:
        """Called when all engines serve `version`."""
        self._version = version

    # -- shared ----------------------------------------------------------------------------------------------------------

    def _begin(self, stretch: Stretch) -> None:
        task = asyncio.create_task(self._source.play(stretch))
        self._in_flight.append(InFlight(stretch=stretch, task=task, began=time.monotonic(), version=self._version))

    async def __aenter__(self) -> Self:
        await self._resume()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Cancel what is in flight. After a success the newest version is served, because it plays the scores."""
        try:
            await self._publisher.close(failed=kind is not None)
        finally:
            for each in self._in_flight:
                each.task.cancel()
            await asyncio.gather(*(each.task for each in self._in_flight), return_exceptions=True)
            self._in_flight.clear()
