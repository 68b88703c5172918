"""The rule on a pipeline on paper, by a clock on paper: players that publish in bunches, a trainer, a bound on what is ahead."""

import itertools
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pipeline.producer_rule import COLD_S, SPARE_S, FleetStatus, ProducerRule, Sighting

TICK_S = 0.25
START_GROUPS = 16


@dataclass
class Player:
    """The flow itself, or a producer."""

    plays_from: float
    made: float = 0.0
    published: int = 0


@dataclass
class Pipeline:
    """Players make `rate` start groups a second each, together never more than `shared`, while fewer than three steps' are ready.

    They publish them in bunches. A step takes START_GROUPS and then computes for `busy_s(now)` seconds. A producer that is asked
    for plays `starts_after_s` later.
    """

    rule: ProducerRule
    busy_s: Callable[[float], float]
    own: float
    rate: float
    starts_after_s: float = 15.0
    shared: float = math.inf
    bunch: int = 4
    noise: float = 0.0
    now: float = 0.0
    asked: list[tuple[float, int]] = field(default_factory=list)
    """(when, target) of every change."""
    reasons: list[str] = field(default_factory=list)
    waited: list[tuple[float, bool]] = field(default_factory=list)
    """(when, whether the trainer waited)."""

    def run(self, seconds: float) -> "Pipeline":
        dice = random.Random(5)
        mine, producers, gone = Player(0.0), list[Player](), 0
        trained = taken = 0
        trains_until, told_at = 0.0, -math.inf
        last, idle = self.rule.target, True
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            ready = mine.published + gone + sum(each.published for each in producers) - taken
            playing = [each for each in producers if each.plays_from <= self.now]
            if ready < 3 * START_GROUPS:
                rates = [(mine, self.own), *((each, self.rate) for each in playing)]
                scale = min(1.0, self.shared / max(1e-9, sum(rate for _, rate in rates)))
                for player, rate in rates:
                    player.made += rate * scale * TICK_S * (1 + self.noise * dice.uniform(-1, 1))
                    if player.made >= self.bunch:
                        player.made -= self.bunch
                        player.published += self.bunch
            training, ended, waited = self.now < trains_until, False, idle
            if not training and trained < taken:
                trained, ended = taken, True
            begins = not training and ready >= START_GROUPS
            if begins:
                taken += START_GROUPS
                trains_until, training = self.now + self.busy_s(self.now), True
            idle = not training
            self.waited.append((self.now, idle))
            if ended or begins or (idle and self.now - told_at >= 1.0):
                told_at = self.now
                fleet = FleetStatus(
                    asked=last, alive=len(playing), starting=len(producers) - len(playing), lost=0,
                    published=gone + sum(each.published for each in producers), in_flight=0,
                    playing=len(playing), proven=sum(each.published > 0 for each in playing),
                )  # fmt: skip
                surplus = ended and ready - START_GROUPS >= START_GROUPS
                seen = Sighting(now=self.now, waiting=waited, trained=trained, surplus=surplus, fleet=fleet)
                why = self.rule.after(seen)
                if self.rule.target != last:
                    last = self.rule.target
                    self.asked.append((self.now, last))
                    self.reasons.append(why)
                while len(producers) < last:
                    producers.append(Player(self.now + self.starts_after_s))
                while len(producers) > last:
                    gone += producers.pop().published
        return self

    def waited_share(self, since: float) -> float:
        later = [waited for when, waited in self.waited if when >= since]
        return sum(later) / len(later)


def pipeline(busy_s: float | Callable[[float], float], own: float, rate: float, most: int = 20, **more: float) -> Pipeline:
    busy = busy_s if callable(busy_s) else lambda now: busy_s
    return Pipeline(ProducerRule(0, most), busy, own, rate, **more)  # type: ignore[arg-type]


def test_one_producer_is_asked_for_within_seconds_and_the_number_that_is_needed_within_a_minute():
    """16 start groups a second are needed, the flow plays 4, a producer 2: six."""
    played = pipeline(1.0, own=4.0, rate=2.0).run(600)
    assert [number for _, number in played.asked] == [1, 6]
    assert played.asked[0][0] < 15 and played.asked[1][0] < 60
    assert played.waited_share(since=120) < 0.02
    assert re.search(r"it gets [56][.\d]* start groups a second of 16, and a producer brings [12][.\d]*", played.reasons[1])


def test_with_steps_of_a_minute_the_first_is_asked_for_while_the_first_step_still_waits():
    """0.8 start groups a second are needed, the flow plays 0.2, so a step takes 80 s; a producer plays 0.1: six, or one more."""
    played = pipeline(20.0, own=0.2, rate=0.1).run(3000)
    assert played.asked[0] == (pytest.approx(COLD_S, abs=1), 1)
    assert [number for _, number in played.asked] == [1, 7]
    assert played.waited_share(since=600) < 0.05


@pytest.mark.parametrize("busy_s, own", [(1.0, 4.0), (20.0, 0.2)], ids=["steps of a second", "steps of a minute"])
def test_producers_that_share_a_bottleneck_with_the_flow_are_dismissed_and_tried_again_ever_more_rarely(
    busy_s: float, own: float
):
    played = pipeline(busy_s, own=own, rate=own, shared=own).run(8000)
    settled = [(when, number) for when, number in played.asked if when > 800]
    assert max(number for _, number in settled) <= 2
    assert any("share a bottleneck" in reason for reason in played.reasons)
    tries = [when for (when, number), (_, before) in zip(settled[1:], settled, strict=False) if number > before]
    assert len(tries) <= 4 and all(after - before > 500 for before, after in itertools.pairwise(tries))
    assert played.rule.exhausted.startswith("more than") or played.rule._trial is not None


def test_where_only_some_help_as_many_stay():
    """Together they play 10 a second, of which the flow has 4 and a producer 4."""
    played = pipeline(1.0, own=4.0, rate=4.0, shared=10.0).run(300)
    assert [number for _, number in played.asked] == [1, 3, 2]


def test_a_flow_that_is_fast_enough_asks_for_none():
    assert pipeline(1.0, own=20.0, rate=4.0).run(1000).asked == []


def test_producers_that_are_no_longer_needed_are_dismissed_one_by_one():
    played = pipeline(lambda now: 1.0 if now < 300 else 20.0, own=4.0, rate=2.0).run(3000)
    later = [number for when, number in played.asked if when > 300]
    assert later == [5, 4, 3, 2, 1, 0] and played.waited_share(since=400) < 0.02
    assert all(after - before >= SPARE_S for (before, _), (after, _) in zip(played.asked[2:], played.asked[3:], strict=False))


@pytest.mark.parametrize("seed", range(3))
def test_the_number_does_not_swing_however_uneven_the_pace_is(seed: int):
    dice = random.Random(seed)
    played = pipeline(lambda now: dice.choice([0.5, 1.0, 1.5, 3.0]), own=4.0, rate=2.0, noise=0.5, bunch=8).run(3000)
    changes = [number for when, number in played.asked if when > 400]
    assert len(changes) <= 6 and played.waited_share(since=400) < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_whatever_it_sees_it_stays_within_its_bounds_and_says_why_it_moves(seed: int):
    dice = random.Random(seed)
    least = dice.randint(0, 2)
    rule, now, trained, published = ProducerRule(least, most := least + dice.randint(0, 4)), 0.0, 0, 0
    for _ in range(400):
        now, before = now + dice.choice([0.0, 0.5, 5.0, 200.0]), rule.target
        trained, published = trained + dice.choice([0, 16]), published + dice.choice([0, 5])
        alive = dice.randint(0, 5)
        fleet = FleetStatus(
            asked=0, alive=alive, starting=0, lost=0, published=published, in_flight=0, playing=dice.randint(0, alive),
            proven=dice.randint(0, alive),
        )  # fmt: skip
        flags = {name: dice.random() < 0.5 for name in ("waiting", "surplus", "full")}
        why = rule.after(Sighting(now=now, trained=trained, fleet=fleet, **flags))
        assert least <= rule.target <= most
        assert bool(why) == (rule.target != before)
