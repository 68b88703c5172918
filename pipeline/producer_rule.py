"""Decides how many rollout producers play beside the training flow, by the clock. The rule is pure: tests simulate the clock.

It is told the time, whether the trainer waits, and what was trained and published so far. A trainer that waited WAITED of the
last WINDOW_S is starved. Then one producer is asked for. Once all that were asked for have published, the rule compares the start
groups a second that the trainer needs with those that it gets, and asks for as many producers as the measured gain of the last
ones says. It never asks while others are still starting. Producers that brought little are dismissed again, and what was learned
this way is remembered, so that the number does not swing.
"""

import math
from collections import deque
from dataclasses import dataclass, replace

WAITED = 0.05
"""Share of WINDOW_S from which on the trainer's waiting counts."""
WINDOW_S = 60.0
"""Seconds over which the trainer's waiting is counted."""
COLD_S = 30.0
"""The same in seconds before two steps were trained, with whose rate a later one can be compared, and while more may be ahead."""
JUDGE_S = 10.0
"""Seconds, and JUDGE_STEPS whole steps, for which all producers play before the last ones are judged and more are asked for."""
JUDGE_STEPS = 8
LONG_STEPS = 2
"""The same where JUDGE_STEPS take longer than WINDOW_S."""
HELPED = 0.3
"""Share of a producer's own rate by which the trainer must get more, or the producer did not help: it took from others."""
BOLD = 3
"""Producers asked for at a time, at most, for each that plays and for the flow itself."""
SPARE_S = 300.0
"""Seconds with a step's start groups to spare, and without waiting, after which a producer is dismissed. What is ready hides the
loss of a producer for some minutes."""
PAUSE_S = 300.0
"""Seconds before the rule tries again what did not help; doubled each time."""
REMEMBER_S = 1800.0
"""Seconds for which the rule keeps a producer that it dismissed and then missed; doubled each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """Rollout producers of a run beside its own process."""

    asked: int
    """Target number of producers."""
    alive: int
    """Producers at work according to their status files, whoever started them."""
    starting: int
    """Producers started that have no status file yet."""
    lost: int
    """Producers that failed or ended without a final status since the fleet was opened."""
    published: int
    """Start groups that producers have published in total."""
    in_flight: int
    """Start groups that producers play now, or have played and not yet published."""
    playing: int = 0
    """Producers at work that play now."""
    proven: int = 0
    """Producers at work that have published something."""


NO_PRODUCERS = FleetStatus(asked=0, alive=0, starting=0, lost=0, published=0, in_flight=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What the rule is told: at the beginning and end of each step, and about every second while a step waits."""

    now: float
    """Monotonic seconds."""
    waiting: bool
    """Whether the trainer waited for rollouts since the sighting before."""
    trained: int
    """Start groups that the steps of this process took so far."""
    surplus: bool
    """Whether a step has just ended with all start groups of another one ready."""
    fleet: FleetStatus
    full: bool = True
    """Whether as much is ahead as may be. Else more may be played ahead first, and the trainer must wait for longer."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """Totals at a time, from the first sighting on."""

    now: float
    waited: float
    """Seconds in which the trainer waited."""
    trained: int


@dataclass(frozen=True, slots=True)
class _Trial:
    """Producers that were asked for and are not judged yet."""

    before: int
    """Producers before."""
    rate: float | None
    """Start groups a second that the trainer got before they played; None: unknown, so they cannot be judged."""
    added: int


class ProducerRule:
    """The number of producers, from sightings in the order of time."""

    def __init__(self, least: int, most: int) -> None:
        """`least`, `most`: bounds of the number that is asked for."""
        self._least, self._most = least, most
        self.target = least
        """Producers that should be at work."""
        self._recent: deque[_Mark] = deque()  # of the last WINDOW_S, since the last change
        self._steps: deque[_Mark] = deque(maxlen=32)  # at the steps taken since the last change settled
        self._mark = _Mark(-math.inf, 0.0, 0)
        self._played_s, self._published = 0.0, 0  # seconds for which producers played, and what they published, both in total
        self._published_before = -1  # at the first sighting
        self._each: float | None = None  # start groups a second that a producer brings
        self._trial: _Trial | None = None
        self._full = True
        self._settled = False  # every producer asked for has published
        self._since = math.inf  # when they had
        self._spare_since: float | None = None
        self._ceiling, self._ceiling_until, self._pause_s = most, -math.inf, PAUSE_S
        self._floor, self._floor_until, self._keep_s = least, -math.inf, REMEMBER_S
        self._dismissed_at = -math.inf

    def after(self, seen: Sighting) -> str:
        """Take a sighting in. Returns why `target` changed, or an empty text."""
        self._take_in(seen)
        now, before, why = seen.now, self.target, ""
        if now >= self._ceiling_until:
            self._ceiling = self._most
        if now >= self._floor_until:
            self._floor = self._least
        if self._trial is not None and self._can_judge(now):
            why = self._judge(now)
        elif self._trial is None and self._settled and self.starved:
            why = self._ask_for_more(seen)
        elif self._spare_since is not None and now - self._spare_since >= SPARE_S and self.target > self._floor:
            self.target, self._spare_since, self._dismissed_at = self.target - 1, now, now
            why = f"for {SPARE_S:.0f} s the trainer has not waited, and a step's start groups are to spare"
        if self.target == before:
            return ""
        self._begin_again(seen)
        return f"{self.target} rollout producers instead of {before}: {why}"

    @property
    def waited_s(self) -> float:
        """Seconds that the trainer waited within the last WINDOW_S, at most since the last change."""
        return self._recent[-1].waited - self._recent[0].waited if self._recent else 0.0

    @property
    def starved(self) -> bool:
        """Whether the trainer waits too much."""
        cold = not self._full or (self._trial is None and self._rates is None)
        return self.waited_s >= (COLD_S if cold else WAITED * WINDOW_S)

    @property
    def exhausted(self) -> str:
        """Why no more producers are asked for although the trainer is starved; empty if more are, or may soon be."""
        if not self.starved or not self._settled or self._trial is not None:
            return ""
        if self.target >= self._most:
            return f"{self.target} rollout producers play, as many as pipeline.producers_max allows"
        return f"more than {self._ceiling} rollout producers changed little" if self.target >= self._ceiling else ""

    # -- what was seen -----------------------------------------------------------------------------------------------------

    def _take_in(self, seen: Sighting) -> None:
        last, fleet = self._mark, seen.fleet
        passed = max(0.0, seen.now - last.now) if math.isfinite(last.now) else 0.0
        self._mark = mark = _Mark(seen.now, last.waited + (passed if seen.waiting else 0.0), seen.trained)
        self._played_s += passed * fleet.playing
        self._full = seen.full
        if self._published_before < 0:
            self._published_before = fleet.published
        self._published = fleet.published - self._published_before
        if not last.trained and mark.trained:
            self._recent.clear()  # the first step of a process waits in any case
        settled = fleet.proven >= self.target
        if settled and not self._settled:
            if self._trial is not None and self._trial.rate is None and self._rates is not None:
                self._trial = replace(self._trial, rate=self._rates[0])  # while they started, nothing had changed yet
            self._since = seen.now
            self._recent.clear()
            self._steps.clear()
        self._settled = settled
        self._recent.append(mark)
        while self._recent[0].now < seen.now - WINDOW_S:
            self._recent.popleft()
        if mark.trained > last.trained:
            self._steps.append(mark)
        if seen.waiting:
            self._spare_since = None
        elif seen.surplus and self._spare_since is None:
            self._spare_since = seen.now
        elif mark.trained > last.trained and not seen.surplus:
            self._spare_since = None

    def _begin_again(self, seen: Sighting) -> None:
        """What was seen before a change of the number says nothing about what comes."""
        self._recent.clear()
        self._recent.append(self._mark)
        self._since = seen.now
        self._settled = self._trial is None and seen.fleet.proven >= self.target
        if self._trial is None:
            self._steps.clear()

    @property
    def _rates(self) -> tuple[float, float] | None:
        """Start groups a second that the trainer gets, and that it would take if it never waited; None: unknown yet."""
        if len(self._steps) < 2:
            return None
        first, last = self._steps[0], self._steps[-1]
        taken, seconds = last.trained - first.trained, last.now - first.now
        busy = seconds - (last.waited - first.waited)
        return (taken / seconds, taken / max(busy, 1e-3)) if seconds > 0 else None

    def _rate_of_one(self) -> float | None:
        """Start groups a second of one producer: what the last ones brought, else what producers publish while they play."""
        if self._each is None and self._published > 0 and self._played_s > 0:
            return self._published / self._played_s
        return self._each

    # -- what follows ------------------------------------------------------------------------------------------------------

    def _ask_for_more(self, seen: Sighting) -> str:
        there = max(self.target, seen.fleet.alive)
        most = min(self._most, self._ceiling)
        if there >= most:
            return ""
        rates, each, more = self._rates, self._rate_of_one(), 1
        why = f"the trainer waited {self.waited_s:.0f} s of the last {WINDOW_S:.0f}"
        if rates is not None and each and self._pause_s == PAUSE_S:  # after one that did not help, only one more is tried
            more = min(max(1, math.ceil((rates[1] - rates[0]) / each)), BOLD * (there + 1))
            why += f"; it gets {rates[0]:.2g} start groups a second of {rates[1]:.2g}, and a producer brings {each:.2g}"
        if seen.now - self._dismissed_at < self._keep_s:
            self._floor, self._floor_until = min(most, there + 1), seen.now + self._keep_s
            self._keep_s *= 2
        solid = rates is not None and self._is_long(seen.now - self._steps[0].now, len(self._steps) - 1)
        self._trial = _Trial(there, rates[0] if rates is not None and solid else None, min(more, most - there))
        self.target = there + self._trial.added
        return why

    def _can_judge(self, now: float) -> bool:
        """Whether all producers have played long enough."""
        played = now - self._since
        relieved = not self.starved and played >= WINDOW_S
        return self._settled and (relieved or self._is_long(played, len(self._steps) - 1))

    @staticmethod
    def _is_long(seconds: float, steps: int) -> bool:
        """Whether rates over so many whole steps can be compared: where steps end unevenly, few say little."""
        return seconds >= JUDGE_S and (steps >= JUDGE_STEPS or (seconds >= WINDOW_S and steps >= LONG_STEPS))

    def _judge(self, now: float) -> str:
        """Keep the last producers, or dismiss as many as brought nothing."""
        trial, rates, self._trial = self._trial, self._rates, None
        assert trial is not None
        if trial.rate is None or rates is None or not self.starved:
            return ""
        gain, alone = rates[0] - trial.rate, self._rate_of_one()
        if not alone or gain >= max(HELPED * alone * trial.added, WAITED * trial.rate):
            brought = gain / trial.added
            self._each = min(max(brought, alone / 2), 2 * alone) if alone else max(brought, 1e-9)
            return ""
        self.target = max(self._least, trial.before + max(0, round(gain / alone)))
        self._ceiling, self._ceiling_until = self.target, now + self._pause_s
        self._pause_s *= 2
        return "the trainer gets no more than before, so the others share a bottleneck with those that stay"
