"""Assigns start groups to rollout tasks: how many per task, and with which numbers.

Numbers are assigned in ascending order. Numbers that were given back because nothing was published under them are assigned again
first. A number determines the step whose positions it starts from, so it always means the same position.
"""

import heapq
import math

from pipeline.resources import PRODUCER
from pipeline.rollout_source import Stretch
from pipeline.run_settings import PipelineSettings
from storage.files import names_in
from storage.runs import RunPaths
from storage.shards import SHARD_NAME, coverage

ROLLOUT_RETRIES = 2
"""Retries of a rollout task. A second success is harmless, because its shard's name is taken."""
TASK_COST_S = 0.026
"""Seconds that Prefect adds to a task, measured with the temporary server; see docs/architecture.md."""
TASK_COST_SHARE = 0.02
"""Largest share of a task's time that Prefect's cost may be."""
LOOK_BACK_STEPS = 8
"""Steps before the newest shard in which a resumed run searches for start groups that were never published."""


def groups_per_task(start_groups: int, pipeline: PipelineSettings, group_s: float | None) -> int:
    """Number of start groups per rollout task.

    Args:
        start_groups: number per step.
        group_s: measured seconds per start group; None if none was measured.

    Returns:
        all of a step if the run is in lockstep or nothing was measured; otherwise enough to make Prefect's cost a small share.
    """
    if pipeline.groups_per_task:
        return min(start_groups, pipeline.groups_per_task)
    if pipeline.in_lockstep or group_s is None or group_s <= 0:
        return start_groups
    return min(start_groups, max(1, math.ceil(TASK_COST_S / TASK_COST_SHARE / group_s)))


class GroupNumbers:
    """Assigns start-group numbers."""

    def __init__(self, per_step: int) -> None:
        """`per_step`: number of start groups of a step."""
        self._per_step = per_step
        self._next = 0
        self._given_back: list[Stretch] = []

    def next(self, count: int) -> Stretch:
        """At most `count` consecutive start groups of one step."""
        if self._given_back:
            stretch = heapq.heappop(self._given_back)
            if stretch.count > count:
                rest = Stretch(stretch.first_group + count, stretch.count - count, stretch.step)
                heapq.heappush(self._given_back, rest)
            return Stretch(stretch.first_group, min(count, stretch.count), stretch.step)
        first = self._next
        step = self._step_of(first)
        taken = min(count, step * self._per_step - first)
        self._next = first + taken
        return Stretch(first, taken, step)

    def give_back(self, stretch: Stretch) -> None:
        """Assign these numbers again, before new ones, because not all of them were published."""
        heapq.heappush(self._given_back, stretch)

    def resume(self, paths: RunPaths) -> tuple[str, ...]:
        """Continue after the newest published number. Unpublished numbers before it are assigned again.

        Returns:
            sentences about damaged shards, which are set aside; their start groups are played again.
        """
        published = [int(found[1]) for name in names_in(paths.shards / PRODUCER) if (found := SHARD_NAME.fullmatch(name))]
        if not published:
            return ()
        newest = max(published)
        first = max(0, self._step_of(newest) - 1 - LOOK_BACK_STEPS) * self._per_step
        found = coverage(paths, PRODUCER, first, newest - first + 1)
        self._next = max([newest + 1, *(shard.next_start_group for shard in found.published)])
        for start, count in found.missing:
            for number in range(start, start + count):
                self.give_back(Stretch(number, 1, self._step_of(number)))
        return found.set_aside

    def _step_of(self, number: int) -> int:
        return number // self._per_step + 1
