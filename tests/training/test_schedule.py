"""The rate and the entropy weight of a step: the one a function of the step alone, the other led to its target."""

import math
from itertools import pairwise

import pytest
import torch
from pydantic import ValidationError

from training.schedule import RATE, WEIGHT_MAX, entropy_weight, next_entropy_weight, rate_at, set_rate
from training.settings import TrainingSettings


def settings(**given) -> TrainingSettings:
    return TrainingSettings(learning_rate=2.0, **given)


def test_without_a_schedule_every_step_has_the_full_rate():
    assert {rate_at(step, settings()) for step in (1, 2, 1000)} == {2.0}


def test_a_warm_up_rises_in_a_straight_line_and_its_first_step_already_learns():
    assert [rate_at(step, settings(warm_up_steps=4)) for step in range(1, 7)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_falling_schedule_is_highest_after_its_warm_up_and_ends_at_its_share(name: str):
    falling = settings(rate_schedule=name, warm_up_steps=2, decay_steps=12)
    rates = [rate_at(step, falling) for step in range(1, 15)]
    assert rates[1] == 2.0 and rates[11:] == pytest.approx([0.2, 0.2, 0.2])
    assert all(late < early for early, late in pairwise(rates[1:12]))
    assert rates[6] == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # half way down, on both


def test_the_cosine_is_a_cosine():
    falling = settings(rate_schedule="cosine", decay_steps=8)
    assert rate_at(2, falling) == pytest.approx(0.2 + 0.9 * (1 + math.cos(math.pi / 4)))


def test_a_falling_schedule_without_an_end_is_refused_with_both_numbers():
    with pytest.raises(ValidationError, match=r"decay_steps 5 must lie after training.warm_up_steps 5 for the linear"):
        settings(rate_schedule="linear", warm_up_steps=5, decay_steps=5)


def test_the_rate_is_that_of_the_next_optimiser_step():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(1)
    set_rate(optimiser, 0.25)
    optimiser.step()
    assert weight.item() == -0.25


SETTINGS = TrainingSettings(entropy_weight=0.1, entropy_target=0.8)


def test_without_a_target_the_weight_is_the_setting_s_whatever_was_held():
    plain = TrainingSettings(entropy_weight=0.1)
    assert entropy_weight(None, plain) == entropy_weight(0.4, plain) == 0.1
    assert next_entropy_weight(0.4, 0.5, plain) is None


@pytest.mark.parametrize(
    ("held", "measured", "after"),
    [
        (None, 0.3, 0.1 + RATE * 0.5),
        (None, 1.3, 0.1 - RATE * 0.5),
        (0.2, 0.8, 0.2),
        (0.001, 1.8, 0.0),
        (WEIGHT_MAX - 0.001, 0.1, WEIGHT_MAX),
        (None, None, 0.1),
        (0.2, math.nan, 0.2),
    ],
    ids=["below", "above", "on target", "lower bound", "upper bound", "not measured", "no number"],
)
def test_the_weight_rises_below_the_target_and_falls_above_it(held: float | None, measured: float | None, after: float):
    found = next_entropy_weight(held, measured, SETTINGS)
    assert found == pytest.approx(after) and entropy_weight(found, SETTINGS) == found


def test_a_policy_that_sharpens_is_held_at_the_target():
    """Entropy falls by a fortieth a step; a weight of 0.1 would hold it at the target."""
    entropy, held = 0.9, None
    for _ in range(400):
        weight = entropy_weight(held, SETTINGS)
        held = next_entropy_weight(held, entropy, SETTINGS)
        entropy = entropy - entropy / 40 + 0.2 * weight
    assert entropy == pytest.approx(0.8, abs=0.02) and held == pytest.approx(0.1, abs=0.01)
