"""Which start groups a rollout task takes: how many at a time, and by which numbers.

GroupNumbers are handed out once and in order; those that were given back, because nothing was published under them, go first. A number
says from which step's positions it begins, so it means the same position whenever it is played.
"""

import heapq
import math

from pipeline.resources import PRODUCER
from pipeline.rollout_source import Stretch
from pipeline.run_settings import PipelineSettings
from storage.files import FILES
from storage.runs import RunPaths
from storage.shards import SHARD_NAME, coverage

ROLLOUT_RETRIES = 2
"""Retries of a rollout task; its shard's name makes a second success harmless."""
TASK_COST_S = 0.026
"""What Prefect adds to a task, seconds: measured with the ephemeral server; see docs/architecture.md."""
TASK_COST_SHARE = 0.02
"""Share of a task's time that this may be."""
LOOK_BACK_STEPS = 8
"""Steps' worth of numbers below the newest shard in which a resumed run looks for start groups that were never published."""


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


class GroupNumbers:
    """Hands out start-group numbers."""

    def __init__(self, start_groups: int, family: int = 1) -> None:
        """
        Args:
            start_groups: of a step; positions are drawn for so many numbers at a time.
            family: start groups that are played together, from a multiple of that number.
        """
        self._start_groups, self._family = start_groups, family
        self._next = 0
        self._given_back: list[Stretch] = []

    def next(self, count: int) -> Stretch:
        """At most `count` start groups next to one another, of one step's positions, whole families."""
        if self._given_back:
            stretch = heapq.heappop(self._given_back)
            if stretch.count > count:
                rest = Stretch(stretch.first_group + count, stretch.count - count, stretch.step)
                heapq.heappush(self._given_back, rest)
            return Stretch(stretch.first_group, min(count, stretch.count), stretch.step)
        first = self._next
        step = first // self._start_groups + 1
        taken = min(count, step * self._start_groups - first)
        self._next = first + taken
        return Stretch(first, taken, step)

    def give_back(self, stretch: Stretch) -> None:
        """Nothing was published under these numbers, or not all of it: they go out again before new ones."""
        heapq.heappush(self._given_back, stretch)

    def resume(self, paths: RunPaths) -> tuple[str, ...]:
        """Go on after the newest published number; gaps below it are given back.

        Returns:
            sentences about damaged shards, which were set aside and whose groups are played again.
        """
        published = [int(found[1]) for name in FILES.names(paths.shards / PRODUCER) if (found := SHARD_NAME.fullmatch(name))]
        if not published:
            return ()
        newest = max(published)
        first = max(0, newest // self._start_groups - LOOK_BACK_STEPS) * self._start_groups
        found = coverage(paths, PRODUCER, first, newest - first + 1)
        end = max([newest + 1, *(shard.next_start_group for shard in found.published)])
        # What is left of the newest step's positions after the last shard is handed out as usual.
        self._next = -(-end // self._family) * self._family
        for start, count in found.missing:
            for number in range(start, start + count):
                if number % self._family == 0:
                    self.give_back(Stretch(number, min(self._family, start + count - number), number // self._start_groups + 1))
        return found.set_aside
