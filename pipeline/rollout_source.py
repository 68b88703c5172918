"""Where rollouts come from, as the flow sees it: something that takes start groups and has their shard published.

A source may be this process, a Dask cluster or the shards of an earlier run; the flow keeps it busy and never asks which it is.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.play import RolloutReport


@dataclass(frozen=True, slots=True, order=True)
class Stretch:
    """Start groups that one rollout task plays: they lie next to one another and belong to one step's positions."""

    first_group: int
    """Number of the first."""
    count: int
    """How many."""
    step: int
    """The step whose positions they begin from: numbers and positions belong together, whichever step trains on the rows."""
    after: Path | None = None
    """A step's ledger, without which nothing of it is published: what that step chooses from does not depend on who is faster."""


class RolloutSource(Protocol):
    """Plays start groups and publishes them."""

    async def play(self, stretch: Stretch) -> RolloutReport:
        """Have the shards of `stretch` published by the time this returns; what is published already is not played again.

        Cancelling the call gives up what is not published yet. Two calls for one stretch are harmless: the first shard stands.
        """
        ...
