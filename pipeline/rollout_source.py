"""The interface of rollout sources: this process, or a Dask cluster."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.play import RolloutReport
from pipeline.run_settings import RunSettings


@dataclass(frozen=True, slots=True, order=True)
class Stretch:
    """Consecutive start groups that one rollout task plays. All start from the positions of one step."""

    first_group: int
    """Number of the first start group."""
    count: int
    """Number of start groups."""
    step: int
    """The step whose positions they start from. Any step may train on the rows."""
    after: Path | None = None
    """Ledger of a step. The shard is published only once this file exists, so it cannot change what that step selects."""


STRETCHES_AT_ONCE = 4
"""Stretches that a process plays at once; their requests meet in the batches of one engine."""


def groups_per_task(settings: RunSettings) -> int:
    """Start groups that a rollout task of the run plays: an equal share of a step for each process that plays.

    A task has the whole share, so that the same requests meet in the same batches. It has a quarter of it where a step may begin
    before all its own start groups are played.
    """
    pipeline = settings.pipeline
    processes = pipeline.dask_workers if pipeline.task_runner == "dask" else 1
    parts = processes * (1 if pipeline.buffer_depth <= 1 else STRETCHES_AT_ONCE)
    return -(-settings.rollouts.start_groups // parts)


class RolloutSource(Protocol):
    """Plays start groups and publishes them."""

    groups_per_task: int
    """Start groups of a task; see `groups_per_task`."""

    async def play(self, stretch: Stretch) -> RolloutReport:
        """Play and publish the start groups of `stretch`, except those already published.

        A cancelled call publishes nothing more. Two calls for one stretch are harmless: the first published shard counts.
        """
        ...
