"""What the training flow tells its rollout producers: how many start groups each may begin, and whether shards may wait.

What is missing is divided among all who play, so that any number of producers plays no more than the run can train on. A producer
learns of it by the control file; what it began is seen in its status file some seconds later.
"""

import asyncio
import math
import time
from typing import Protocol

from pipeline.producer_rule import NO_PRODUCERS, FleetStatus
from storage.control import ControlDesk
from telemetry.progress import reporter

SEEN_AFTER_S = 5.0
"""Seconds after which what producers were allowed to begin is seen in their status files."""


class Fleet(Protocol):
    """The rollout producers of a run."""

    def status(self) -> FleetStatus:
        """The producers as of a few seconds ago."""
        ...

    def set_target(self, producers: int) -> None:
        """Set how many should be at work. Returns at once."""
        ...


class NoFleet:
    """A run without producers."""

    def status(self) -> FleetStatus:
        """See `Fleet.status`."""
        return NO_PRODUCERS

    def set_target(self, producers: int) -> None:
        """See `Fleet.set_target`."""


class SharedPlay:
    """The flow's side of the control file, for one queue."""

    def __init__(self, control: ControlDesk | None, fleet: Fleet, *, start_groups: int, most: int, plays_here: bool) -> None:
        """
        Args:
            control: None if nobody reads it.
            start_groups: of a step.
            most: start groups that producers may publish for one step, beyond which it trains on what there is.
            plays_here: the flow plays too. Else steps wait for producers, however long there is none.
        """
        self._control, self._fleet, self._wanted = control, fleet, start_groups
        self._most, self._plays_here = most, plays_here
        self._quota = 0  # start groups that each producer may begin with this version
        self._published_before = 0  # when this version was served
        self._allowed_at = -math.inf
        self._said_none = False

    @property
    def is_played(self) -> bool:
        """Whether any producer is at work."""
        return self._fleet.status().alive > 0

    def may_bring_more(self) -> bool:
        """Whether the current step may wait for producers: they play, or may begin more, or nobody else plays."""
        status = self._fleet.status()
        if status.in_flight or self._plays_here:
            return status.in_flight > 0
        if not status.alive and not self._said_none:
            reporter().say("no rollout producer is at work: the step waits for one, such as `entente produce`")
        self._said_none = not status.alive
        return self._said_none or self._may_begin_more(status) or time.monotonic() - self._allowed_at < SEEN_AFTER_S

    def next_version(self, missing: int, ready: int) -> None:
        """A version is about to be served: then what is `missing` may begin, and shards may wait if a whole step is `ready`."""
        status = self._fleet.status()
        self._published_before, self._quota = status.published, 0
        if self._control is not None and status.alive:
            self._raise_quota(missing, status)
            self._control.plan(quota=self._quota, gather=ready >= self._wanted)

    async def step_waits(self, missing: int) -> None:
        """A step waits: shards are published at once, and producers that have played their share may begin what is missing."""
        status = self._fleet.status()
        if self._control is None or not status.alive:
            return
        if self._may_begin_more(status) and time.monotonic() - self._allowed_at >= SEEN_AFTER_S:
            self._raise_quota(missing, status)
        await asyncio.to_thread(self._control.ask, quota=self._quota, gather=False)

    def _may_begin_more(self, status: FleetStatus) -> bool:
        return status.published - self._published_before < self._most

    def _raise_quota(self, missing: int, status: FleetStatus) -> None:
        players = status.alive + self._plays_here  # each begins its share of what is missing
        more = math.ceil(max(0, missing) / players) if players else 0
        if more:
            self._quota, self._allowed_at = self._quota + more, time.monotonic()
