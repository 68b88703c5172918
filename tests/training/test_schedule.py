"""The rate of a step is a function of the step alone."""

import math
from itertools import pairwise

import pytest
from pydantic import ValidationError

from entente.training.imitation.settings import ImitationSettings
from entente.training.settings import TrainingSettings


def settings(**given) -> TrainingSettings:
    return TrainingSettings(learning_rate=2.0, **given)


def test_without_a_schedule_every_step_has_the_full_rate():
    assert {settings().rate_at(step) for step in (1, 2, 1000)} == {2.0}


def test_a_warm_up_rises_in_a_straight_line_and_its_first_step_already_learns():
    assert [settings(warm_up_steps=4).rate_at(step) for step in range(1, 7)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_falling_schedule_is_highest_after_its_warm_up_and_ends_at_its_share(name: str):
    falling = settings(rate_schedule=name, warm_up_steps=2, decay_steps=12)
    rates = [falling.rate_at(step) for step in range(1, 15)]
    assert rates[1] == 2.0 and rates[11:] == pytest.approx([0.2, 0.2, 0.2])
    assert all(late < early for early, late in pairwise(rates[1:12]))
    assert rates[6] == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # half way down, on both
    imitation = ImitationSettings(lr_schedule=name, steps=12, learning_rate=2.0)
    assert imitation.rates.rate_at(12) == pytest.approx(0.2)


def test_the_cosine_is_a_cosine():
    falling = settings(rate_schedule="cosine", decay_steps=8)
    assert falling.rate_at(2) == pytest.approx(0.2 + 0.9 * (1 + math.cos(math.pi / 4)))


def test_a_falling_schedule_without_an_end_is_refused_with_both_numbers():
    with pytest.raises(ValidationError, match=r"decay_steps 5 must lie after training.warm_up_steps 5 for the linear"):
        settings(rate_schedule="linear", warm_up_steps=5, decay_steps=5)
