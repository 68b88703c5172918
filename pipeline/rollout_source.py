"""The interface of rollout sources: this process, a Dask cluster, or the shards of an earlier run."""

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


def groups_per_task(settings: RunSettings) -> int:
    """Start groups that a rollout task of the run plays.

    On Dask one, which keeps all workers busy. In this process all of a step, so that the same requests meet in the same batches;
    a quarter, where a step may begin before all its own are played.
    """
    if settings.pipeline.task_runner == "dask":
        return 1
    groups = settings.rollouts.start_groups
    return groups if settings.pipeline.buffer_depth <= 1 else -(-groups // 4)


class RolloutSource(Protocol):
    """Plays start groups and publishes them."""

    groups_per_task: int
    """Start groups of a task; see `groups_per_task`."""

    async def play(self, stretch: Stretch) -> RolloutReport:
        """Play and publish the start groups of `stretch`, except those already published.

        A cancelled call publishes nothing more. Two calls for one stretch are harmless: the first published shard counts.
        """
        ...
