"""Decides how much to play ahead, from an observation of each step. The rule is pure: tests run it on a simulated pipeline.

It controls two numbers. `ahead` is the number of start groups ready or in flight beyond those of the current step. `producers` is
the number of rollout producers beside this process. A larger `ahead` hides rollouts behind training but makes rows older. So it
grows if the trainer waited. It shrinks if the trainer did not wait and rows expired or reached the largest allowed lag.
"""

import math
from collections import deque
from dataclasses import dataclass

WAITED = 0.05
"""Share of a step above which the trainer's waiting for rollouts counts."""
PATIENCE = 3
"""Steps before another producer is started; twice as many before one is stopped. Producers take long to start."""
HELPED = 0.8
"""A new producer helped if the trainer then waits less than this share of the time before."""
REMEMBERS = 32
"""Steps for which `ahead` does not fall to a value at which the trainer had to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of the controller."""

    start_groups: int
    """Start groups per step."""
    buffer_depth: int
    """Steps that may be ahead, at most."""
    max_policy_lag: int
    """The staleness budget, versions."""
    producers_min: int = 0
    producers_max: int = 0

    @property
    def most(self) -> int:
        """Largest number of start groups ahead."""
        return self.start_groups * self.buffer_depth

    @property
    def least(self) -> int:
        """Smallest number of start groups ahead: half a step, or `most` if that is less."""
        return min(self.most, max(1, self.start_groups // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservation:
    """What the controller observes of a step."""

    waited_share: float
    """Share of the step's wall time in which the trainer waited for rollouts."""
    lag_max: float
    """Largest policy lag of the rows trained on, versions."""
    expired: float
    """Advantage groups that became too old, untrained, since the previous step."""
    ready: int
    """Start groups still ready after the step took its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTarget:
    """The target until the next step is done."""

    ahead: int
    """Start groups ready or in flight beyond those of the current step."""
    producers: int
    """Rollout producers beside this process."""
    reason: str
    """Why the target changed, or, once, why it cannot; otherwise empty."""


class Controller:
    """Computes targets from observations. Starts with the largest `ahead` and the fewest producers."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._shares: deque[float] = deque(maxlen=2 * PATIENCE)  # waited shares since the last producer was started
        self._idle = self._calm = 0
        self._floor = bounds.least
        self._waited_before = math.inf  # mean waited share when the last producer was started
        self._reported_stuck = False  # since the last change
        self.target = QueueTarget(ahead=bounds.most, producers=bounds.producers_min, reason="")

    def after(self, seen: StepObservation) -> QueueTarget:
        """The target after a step with this observation."""
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
            why = f"{seen.ready} start groups are ready and the trainer does not wait"
            self.target = self._moved(self.target.ahead, target.producers - 1, why, before=target)
        return self.target

    def _more(self, seen: StepObservation) -> QueueTarget:
        """The target after a step in which the trainer waited."""
        bounds, target = self._bounds, self.target
        why = f"the trainer waited {seen.waited_share:.0%} of the step"
        if target.ahead < bounds.most and seen.expired == 0:
            self._floor = min(bounds.most, target.ahead + max(1, bounds.start_groups // 4))
            return self._moved(self._floor, target.producers, why)
        if self._starved and target.producers < bounds.producers_max and not self._last_did_not_help:
            self._waited_before = self._mean_waited
            self._shares.clear()
            return self._moved(target.ahead, target.producers + 1, why)
        reason = ""
        if self._stuck and not self._reported_stuck:
            self._reported_stuck, reason = True, self._why_stuck(seen)
        return QueueTarget(ahead=target.ahead, producers=target.producers, reason=reason)

    def _why_stuck(self, seen: StepObservation) -> str:
        """Why the trainer waits although no target can grow."""
        bounds, target = self._bounds, self.target
        if seen.expired > 0:
            limit = f"rows already become too old untrained ({seen.expired:g} groups), so no more may be ahead"
        else:
            limit = f"{target.ahead} start groups are ahead, as many as pipeline.buffer_depth allows"
        if target.producers < bounds.producers_max:
            limit += f", and the last of {target.producers} rollout producers changed little"
        elif bounds.producers_max:
            limit += f", and {target.producers} rollout producers play, as many as pipeline.producers_max allows"
        return (
            f"rollouts are slower than training: the trainer waited for them in {self._mean_waited:.0%} of the time of the last "
            f"{len(self._shares)} steps; {limit}. "
            "The run continues at the pace of its rollouts; `entente runs explain` says what would make them faster"
        )

    def _fresher(self, seen: StepObservation) -> QueueTarget:
        """Rows are old and the trainer did not wait: fewer ahead, but unless rows expired no fewer than `_floor`."""
        target = self.target
        least = self._bounds.least if seen.expired > 0 else self._floor
        ahead = max(min(target.ahead, least), target.ahead - max(1, target.ahead // 8))
        return self._moved(ahead, target.producers, f"rows are old (lag {seen.lag_max:g}, {seen.expired:g} groups expired)")

    @property
    def _starved(self) -> bool:
        """The trainer waited over several steps on average. Rollouts that arrive in bunches leave some steps without waiting."""
        return len(self._shares) >= PATIENCE and self._mean_waited > WAITED

    @property
    def _mean_waited(self) -> float:
        """Mean share waited over the newest steps."""
        return sum(self._shares) / len(self._shares)

    @property
    def _last_did_not_help(self) -> bool:
        """The last producer changed little, because all that may be in flight is already being played."""
        return self._mean_waited > HELPED * self._waited_before

    @property
    def _stuck(self) -> bool:
        return self._starved and (self.target.producers >= self._bounds.producers_max or self._last_did_not_help)

    def _moved(self, ahead: int, producers: int, why: str, before: QueueTarget | None = None) -> QueueTarget:
        before, changes = before or self.target, []
        self._reported_stuck = self._reported_stuck and (ahead, producers) == (before.ahead, before.producers)
        if ahead != before.ahead:
            changes.append(f"{ahead} start groups ahead instead of {before.ahead}")
        if producers != before.producers:
            changes.append(f"{producers} rollout producers instead of {before.producers}")
        return QueueTarget(ahead=ahead, producers=producers, reason=f"{', '.join(changes)}: {why}" if changes else "")
