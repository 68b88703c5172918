"""Rollout tasks kept ahead of the trainer: `buffer_depth` steps in flight while it trains.

A pure rule says how many start groups a task takes; everything else is bookkeeping of asyncio tasks.
"""

import asyncio
import math
import time
from dataclasses import dataclass
from typing import Self

from flows.run_settings import PipelineSettings
from storage.follow import LOOKAHEAD
from storage.ledger import ledger_path
from storage.shards import Coverage, coverage
from tasks.resources import PRODUCER, Resources
from tasks.rollouts import RolloutReport, report_of, roll_out_groups
from telemetry.progress import reporter

TASK_COST_S = 0.026
"""What Prefect adds to a task, seconds: measured with the ephemeral server; see docs/architecture.md."""
TASK_COST_SHARE = 0.02
"""Share of a task's time that this may be."""


def groups_per_task(start_groups: int, pipeline: PipelineSettings, group_s: float | None) -> int:
    """Start groups that one rollout task takes.

    Args:
        start_groups: of the step.
        group_s: measured seconds of a start group; None before any was measured.

    Returns:
        all of them where a run must repeat or nothing is measured yet; else as many as make Prefect's cost a small share.
    """
    if pipeline.groups_per_task:
        return min(start_groups, pipeline.groups_per_task)
    if pipeline.deterministic or group_s is None or group_s <= 0:
        return start_groups
    return min(start_groups, max(1, math.ceil(TASK_COST_S / TASK_COST_SHARE / group_s)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The rollouts of one step."""

    reports: tuple[RolloutReport, ...]
    """None where the step is repeated from its ledger, or enough lay ready."""
    waited: tuple[float, float]
    """When the flow asked for them and when it had them, monotonic seconds."""
    ready_share: float
    """Share of its tasks that were done when the flow asked; 1 where there were none to wait for."""


class RolloutsAhead:
    """Submits the rollout tasks of coming steps, and hands them over step by step."""

    def __init__(self, resources: Resources, pipeline: PipelineSettings, last_step: int) -> None:
        self._resources = resources
        self._pipeline = pipeline
        self._last_step = last_step
        self._in_flight: dict[int, list[asyncio.Task[RolloutReport]]] = {}
        self._found: dict[int, RolloutReport] = {}
        self._group_s: float | None = None
        self._paused_at = 0

    def top_up(self, step: int, ready: int = 0) -> None:
        """Submit what is not in flight yet up to `step` plus the buffer depth; less if enough lies ready.

        Args:
            ready: advantage groups that steps may still train on and have not.
        """
        enough = 0 < self._pipeline.ready_groups_max <= ready
        if enough and step not in self._in_flight and self._may_pause(step):
            reporter().say(f"step {step} plays nothing: {ready} advantage groups lie ready")
            self._in_flight[step], self._paused_at = [], step
        depth = 0 if enough else self._pipeline.buffer_depth
        for wanted in range(step, min(step + depth, self._last_step) + 1):
            if wanted not in self._in_flight:
                self._in_flight[wanted] = self._submit(wanted)

    def _may_pause(self, step: int) -> bool:
        """Not in two steps running, nor over more numbers than an index looks ahead: it would find what comes after late."""
        return self._paused_at != step - 1 and self._resources.rollouts.start_groups < LOOKAHEAD

    async def take(self, step: int) -> StepRollouts:
        """Wait for the rollouts of `step`; a task that failed for good fails here."""
        tasks, asked = self._in_flight[step], time.monotonic()
        ready = sum(task.done() for task in tasks) / len(tasks) if tasks else 1.0
        played = await asyncio.gather(*tasks)
        del self._in_flight[step]
        if played:
            self._group_s = max(report.seconds for report in played) / sum(report.start_groups for report in played)
        found = self._found.pop(step, None)
        reports = (*played, found) if found else tuple(played)
        return StepRollouts(reports=reports, waited=(asked, time.monotonic()), ready_share=ready)

    async def all_played(self) -> None:
        """Wait for everything in flight, without taking it."""
        await asyncio.gather(*(task for tasks in self._in_flight.values() for task in tasks))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End whatever is still in flight, whatever happened."""
        tasks = [task for tasks in self._in_flight.values() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._in_flight.clear()

    def _submit(self, step: int) -> list[asyncio.Task[RolloutReport]]:
        """Tasks for the start groups of `step` that no shard holds: all of them, but for a run that is resumed."""
        if ledger_path(self._resources.paths, self._resources.standing.lineage, step).exists():
            return []  # its rows were chosen already, and the trainer will ask for these very ones
        start_groups = self._resources.rollouts.start_groups
        published = coverage(self._resources.paths, PRODUCER, (step - 1) * start_groups, start_groups)
        self._note_what_stands(step, published)
        # What branches off a start group is played in the same task.
        family = self._resources.rollouts.family
        each = -(-groups_per_task(start_groups, self._pipeline, self._group_s) // family) * family
        work = roll_out_groups.with_options(
            timeout_seconds=self._pipeline.rollout_timeout_s,
            retries=self._pipeline.rollout_retries,
            retry_delay_seconds=1,
            retry_jitter_factor=1,
        )
        return [
            asyncio.create_task(work(self._resources, step, first + offset, min(each, count - offset)))
            for first, count in published.missing
            for offset in range(0, count, each)
        ]

    def _note_what_stands(self, step: int, published: Coverage) -> None:
        for sentence in published.set_aside:
            reporter().say(f"set aside, to be played again: {sentence}")
        if published.published or published.set_aside:
            missing = sum(count for _, count in published.missing)
            self._found[step] = report_of(published, self._resources.rollouts.start_groups - missing)
