"""How much to play ahead, decided from what a step showed: pure, so that it can be tested on a pipeline on paper.

What is moved: the start groups that lie ready or are in flight beyond those of the step at hand (`ahead`), and how many rollout
producers beside this process play for the run. More ahead hides rollouts behind training but makes rows older; so it grows where
the trainer waited and shrinks where rows came too late to be used, or as old as the budget allows, without anybody having waited.
"""

import math
from collections import deque
from dataclasses import dataclass

WAITED = 0.05
"""Share of a step that the trainer may wait for rollouts before that counts as waiting."""
PATIENCE = 3
"""Steps that must have passed before another producer is begun; twice as many before one is ended. They are slow to move."""

HELPED = 0.8
"""A producer helped if the trainer then waits for less than this share of what it waited before."""
REMEMBERS = 32
"""Steps for which what is ahead does not again go down to where the trainer had to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the controller may not leave."""

    start_groups: int
    """Start groups that a step trains on."""
    buffer_depth: int
    """Steps that may be ahead."""
    max_policy_lag: int
    """The staleness budget, versions."""
    producers_min: int = 0
    producers_max: int = 0

    @property
    def most(self) -> int:
        """Most start groups ahead."""
        return self.start_groups * self.buffer_depth

    @property
    def least(self) -> int:
        """Fewest start groups ahead: half a step, where anything may be."""
        return min(self.most, max(1, self.start_groups // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservation:
    """What a step showed."""

    waited_share: float
    """Share of its wall time in which the trainer waited for rollouts."""
    lag_max: float
    """Largest policy lag of the rows it trained on, versions."""
    expired: float
    """Advantage groups that became too old since the step before, untrained."""
    ready: int
    """Start groups that lay ready when the step had taken its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTarget:
    """What to do until the next step is done."""

    ahead: int
    """Start groups, ready or in flight, beyond those of the step at hand."""
    producers: int
    """Rollout producers beside this process."""
    reason: str
    """Why anything moved, or, once, why nothing can; empty where nothing was to be done."""


class Controller:
    """Turns what steps show into targets; begins with everything ahead that may be, and as few producers as may be."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._shares: deque[float] = deque(maxlen=2 * PATIENCE)  # waited, of the newest steps since a producer was begun
        self._idle = self._calm = 0
        self._floor = bounds.least
        self._waited_before = math.inf  # when the last producer was begun
        self._told_stuck = False  # since anything moved
        self.target = QueueTarget(ahead=bounds.most, producers=bounds.producers_min, reason="")

    def after(self, seen: StepObservation) -> QueueTarget:
        """The target after a step that showed `seen`."""
        bounds, target = self._bounds, self.target
        waited, surplus = seen.waited_share > WAITED, seen.ready >= bounds.start_groups
        self._shares.append(seen.waited_share)
        self._calm = 0 if waited else self._calm + 1
        self._idle = self._idle + 1 if surplus and not waited else 0
        if self._calm >= REMEMBERS:
            self._floor, self._waited_before = bounds.least, math.inf
        if waited:
            self.target = self._more(seen)
        elif seen.expired > 0 or (surplus and seen.lag_max >= bounds.max_policy_lag):
            self.target = self._fresher(seen)
        else:
            self.target = QueueTarget(ahead=target.ahead, producers=target.producers, reason="")
        if self.target.producers == target.producers and self._idle >= 2 * PATIENCE and target.producers > bounds.producers_min:
            self._idle = 0
            why = f"{seen.ready} start groups lie ready and nobody waits"
            self.target = self._moved(self.target.ahead, target.producers - 1, why, before=target)
        return self.target

    def _more(self, seen: StepObservation) -> QueueTarget:
        """The trainer waited."""
        bounds, target = self._bounds, self.target
        why = f"the trainer waited {seen.waited_share:.0%} of the step"
        if target.ahead < bounds.most and seen.expired == 0:
            self._floor = min(bounds.most, target.ahead + max(1, bounds.start_groups // 4))
            return self._moved(self._floor, target.producers, why)
        if self._starved and target.producers < bounds.producers_max and not self._in_vain:
            self._waited_before = self._waiting
            self._shares.clear()
            return self._moved(target.ahead, target.producers + 1, why)
        reason = ""
        if self._stuck and not self._told_stuck:
            self._told_stuck, reason = True, self._why_stuck(seen)
        return QueueTarget(ahead=target.ahead, producers=target.producers, reason=reason)

    def _why_stuck(self, seen: StepObservation) -> str:
        """What waiting means where nothing more can be moved; said once until something moves again."""
        bounds, target = self._bounds, self.target
        if seen.expired > 0:
            held = f"rows already become too old untrained ({seen.expired:g} groups), so no more may be ahead"
        else:
            held = f"{target.ahead} start groups are ahead, as many as pipeline.buffer_depth allows"
        if target.producers < bounds.producers_max:
            held += f", and the last of {target.producers} rollout producers changed little"
        elif bounds.producers_max:
            held += f", and {target.producers} rollout producers play, as many as pipeline.producers_max allows"
        return (
            f"rollouts are slower than training: the trainer waited for them in {self._waiting:.0%} of the time of the last "
            f"{len(self._shares)} steps; "
            f"{held}. The run goes on at the pace of its rollouts; `entente runs explain` says what would make them faster"
        )

    def _fresher(self, seen: StepObservation) -> QueueTarget:
        """Rows came late and nobody waited: less ahead, but for a while no less than what the trainer had to wait at."""
        target = self.target
        least = self._bounds.least if seen.expired > 0 else self._floor
        ahead = max(min(target.ahead, least), target.ahead - max(1, target.ahead // 8))
        return self._moved(ahead, target.producers, f"rows come late (lag {seen.lag_max:g}, {seen.expired:g} groups expired)")

    @property
    def _starved(self) -> bool:
        """It waited over several steps, though maybe not in each: what comes in bunches leaves some steps alone."""
        return len(self._shares) >= PATIENCE and self._waiting > WAITED

    @property
    def _waiting(self) -> float:
        """Share waited over the newest steps."""
        return sum(self._shares) / len(self._shares)

    @property
    def _in_vain(self) -> bool:
        """The last producer changed little: all that may be in flight is being played, and each takes its time."""
        return self._waiting > HELPED * self._waited_before

    @property
    def _stuck(self) -> bool:
        return self._starved and (self.target.producers >= self._bounds.producers_max or self._in_vain)

    def _moved(self, ahead: int, producers: int, why: str, before: QueueTarget | None = None) -> QueueTarget:
        before, moves = before or self.target, []
        self._told_stuck = self._told_stuck and (ahead, producers) == (before.ahead, before.producers)
        if ahead != before.ahead:
            moves.append(f"{ahead} start groups ahead instead of {before.ahead}")
        if producers != before.producers:
            moves.append(f"{producers} rollout producers instead of {before.producers}")
        return QueueTarget(ahead=ahead, producers=producers, reason=f"{', '.join(moves)}: {why}" if moves else "")
