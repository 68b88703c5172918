"""Decides how much to play ahead, from an observation of each step. The rule is pure: tests run it on a simulated pipeline.

`ahead` is the number of start groups ready or in flight beyond those of the current step. A larger `ahead` hides rollouts behind
training but makes rows older. So it grows if the trainer waited. It shrinks if the trainer did not wait and rows expired or
reached the largest allowed lag.
"""

from collections import deque
from dataclasses import dataclass, replace

WAITED = 0.05
"""Share of a step above which the trainer's waiting for rollouts counts."""
PATIENCE = 3
"""Steps of waiting before it is reported that nothing can grow."""
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
    reason: str
    """Why the target changed, or, once, why it cannot; otherwise empty."""


class Controller:
    """Computes targets from observations. Starts with the largest `ahead`."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._shares: deque[float] = deque(maxlen=2 * PATIENCE)  # waited shares since the last change
        self._calm = 0
        self._floor = bounds.least
        self._reported_stuck = False  # since the last change
        self.target = QueueTarget(ahead=bounds.most, reason="")

    def after(self, seen: StepObservation) -> QueueTarget:
        """The target after a step with this observation."""
        bounds, waited = self._bounds, seen.waited_share > WAITED
        self._shares.append(seen.waited_share)
        self._calm = 0 if waited else self._calm + 1
        if self._calm >= REMEMBERS:
            self._floor = bounds.least
        if waited:
            self.target = self._more(seen)
        elif seen.expired > 0 or (seen.ready >= bounds.start_groups and seen.lag_max >= bounds.max_policy_lag):
            self.target = self._fresher(seen)
        else:
            self.target = replace(self.target, reason="")
        return self.target

    def _more(self, seen: StepObservation) -> QueueTarget:
        """The target after a step in which the trainer waited."""
        bounds, target = self._bounds, self.target
        if target.ahead < bounds.most and seen.expired == 0:
            self._floor = min(bounds.most, target.ahead + max(1, bounds.start_groups // 4))
            return self._moved(self._floor, f"the trainer waited {seen.waited_share:.0%} of the step")
        reason = ""
        if self._stuck and not self._reported_stuck:
            self._reported_stuck, reason = True, self._why_stuck(seen)
        return replace(target, reason=reason)

    def _why_stuck(self, seen: StepObservation) -> str:
        """Why the trainer waits although no target can grow."""
        if seen.expired > 0:
            limit = f"rows already become too old untrained ({seen.expired:g} groups), so no more may be ahead"
        else:
            limit = f"{self.target.ahead} start groups are ahead, as many as pipeline.buffer_depth allows"
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
        return self._moved(ahead, f"rows are old (lag {seen.lag_max:g}, {seen.expired:g} groups expired)")

    @property
    def _mean_waited(self) -> float:
        """Mean share waited over the newest steps."""
        return sum(self._shares) / len(self._shares)

    @property
    def _stuck(self) -> bool:
        """The trainer waited over several steps on average. Rollouts that arrive in bunches leave some steps without waiting."""
        return len(self._shares) >= PATIENCE and self._mean_waited > WAITED

    def _moved(self, ahead: int, why: str) -> QueueTarget:
        before = self.target
        if ahead == before.ahead:
            return replace(before, reason="")
        self._reported_stuck = False
        return replace(before, ahead=ahead, reason=f"{ahead} start groups ahead instead of {before.ahead}: {why}")
