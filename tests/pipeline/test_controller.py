"""The controller on a pipeline on paper: servers with service times, a trainer with step times, a staleness budget."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pipeline.controller import Bounds, Controller, StepObservation

START_GROUPS = 16


@dataclass
class Pipeline:
    """Discrete events: start groups are served by `servers` at a time, each for `service(number)` seconds; a step takes
    `START_GROUPS` that are ready and within the budget, then computes for `step_s(step)`."""

    controller: Controller
    bounds: Bounds
    service: Callable[[int], float]
    step_s: Callable[[int], float]
    servers: int
    waited: list[float] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    expired: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    in_flight_most: int = 0

    def run(self, steps: int) -> "Pipeline":
        now, number, version = 0.0, 0, 0
        queued: list[int] = []  # version at which each was begun
        ends: list[tuple[float, int]] = []  # (when, version)
        ready: list[int] = []  # versions
        for step in range(1, steps + 1):
            plan = self.controller.target
            began, wanted = now, START_GROUPS + plan.ahead
            train_until: float | None = None
            waited = 0.0
            expired, lag = 0, 0
            while True:
                fresh = [each for each in ready if version - each <= self.bounds.max_policy_lag]
                expired += len(ready) - len(fresh)
                ready = fresh
                if train_until is None:
                    while len(ready) + len(queued) + len(ends) < wanted:
                        queued.append(version)
                    if len(ready) >= START_GROUPS:
                        took, ready = sorted(ready)[:START_GROUPS], sorted(ready)[START_GROUPS:]
                        lag = version - min(took)
                        waited, train_until = now - began, now + self.step_s(step)
                while queued and len(ends) < self.servers:
                    queued.pop(0)
                    heapq.heappush(ends, (now + self.service(number), version))
                    number += 1
                self.in_flight_most = max(self.in_flight_most, len(ends) + len(queued))
                if train_until is not None and (not ends or ends[0][0] >= train_until):
                    now = train_until
                    break
                now, done = heapq.heappop(ends)
                ready.append(done)
            version = step
            self.waited.append(waited / (now - began))
            self.lags.append(lag)
            self.expired.append(expired)
            seen = StepObservation(waited_share=self.waited[-1], lag_max=lag, expired=expired, ready=len(ready))
            plan = self.controller.after(seen)
            self.ahead.append(plan.ahead)
            self.said += [plan.reason] if plan.reason else []
        return self


def pipeline(
    *, service: float | Callable[[int], float], step_s: float | Callable[[int], float] = 10.0, servers: int = 16, **more: int
) -> Pipeline:
    bounds = Bounds(start_groups=START_GROUPS, buffer_depth=more.pop("buffer_depth", 2), max_policy_lag=2, **more)
    return Pipeline(
        Controller(bounds),
        bounds,
        service if callable(service) else lambda number: service,
        step_s if callable(step_s) else lambda step: step_s,
        servers,
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_where_rollouts_are_fast_enough_the_trainer_does_not_wait_and_nothing_expires():
    played = pipeline(service=6.0).run(40)
    assert mean(played.waited[2:]) < 0.03 and sum(played.expired) == 0


def test_it_says_once_that_rollouts_are_too_slow_and_what_holds_it():
    """Though each step waits for another share of its time, and some do not wait at all."""
    alone = pipeline(service=30.0, step_s=lambda step: 10.0 + step % 7 + 40.0 * (step % 5 == 0)).run(40)
    assert len({f"{share:.0%}" for share in alone.waited[5:]}) > 5 and min(alone.waited[5:]) < 0.05
    stuck = [sentence for sentence in alone.said if "slower than training" in sentence]
    assert len(stuck) == 1 and "as many as pipeline.buffer_depth allows" in stuck[0] and "entente runs explain" in stuck[0]


def test_a_trainer_that_stalls_leaves_no_more_in_flight_than_the_bound():
    played = pipeline(service=1.0, step_s=lambda step: 5_000.0 if step == 5 else 10.0).run(12)
    assert played.in_flight_most <= START_GROUPS + played.bounds.most
    assert max(played.waited[6:]) < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_whatever_it_sees_it_stays_within_its_bounds(seed: int):
    dice = random.Random(seed)
    bounds = Bounds(
        start_groups=dice.randint(1, 40),
        buffer_depth=(depth := dice.randint(0, 4)),
        max_policy_lag=depth + dice.randint(0, 2),
    )
    controller = Controller(bounds)
    for _ in range(200):
        before = controller.target
        seen = StepObservation(
            waited_share=dice.choice([0.0, dice.random()]),
            lag_max=dice.randint(0, bounds.max_policy_lag),
            expired=dice.choice([0, 0, dice.randint(0, 30)]),
            ready=dice.randint(0, 3 * bounds.start_groups),
        )
        plan = controller.after(seen)
        assert bounds.least <= plan.ahead <= bounds.most
        assert bool(plan.reason) or plan.ahead == before.ahead, "whatever moves says why"
