"""The clipped token loss against a loop in float64 written from the formula, value and gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.loss import clipped_token_loss
from training.settings import TrainingSettings

SETTINGS = TrainingSettings()


def naive(logprob: float, behaviour: float, advantage: float) -> tuple[float, float]:
    """Loss of one token and its derivative by the logprob, case by case."""
    ratio = math.exp(logprob - behaviour)
    if not SETTINGS.outlier_low <= ratio <= SETTINGS.outlier_high:
        return 0.0, 0.0
    if advantage >= 0:
        if ratio > 1 + SETTINGS.clip_high:
            return -(1 + SETTINGS.clip_high) * advantage, 0.0
        return -ratio * advantage, -ratio * advantage
    if ratio < 1 - SETTINGS.clip_low:
        return -(1 - SETTINGS.clip_low) * advantage, 0.0
    if ratio > SETTINGS.dual_clip:
        return -SETTINGS.dual_clip * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


tokens = st.tuples(st.floats(-12, -0.01), st.floats(-12, -0.01), st.floats(-5, 5))


@settings(deadline=None)
@given(st.lists(tokens, min_size=1, max_size=20))
def test_loss_and_gradient_equal_the_formula(cases):
    near_an_edge = {
        SETTINGS.outlier_low,
        SETTINGS.outlier_high,
        1 + SETTINGS.clip_high,
        1 - SETTINGS.clip_low,
        SETTINGS.dual_clip,
    }
    cases = [c for c in cases if all(abs(math.exp(c[0] - c[1]) / edge - 1) > 1e-3 for edge in near_an_edge) and abs(c[2]) > 1e-3]
    if not cases:
        return
    logprobs = torch.tensor([case[0] for case in cases], requires_grad=True)
    behaviour, advantages = (
        torch.tensor([case[1] for case in cases]),
        torch.tensor([case[2] for case in cases]),
    )
    found = clipped_token_loss(logprobs, behaviour, advantages, SETTINGS)
    found.loss.sum().backward()
    for index, case in enumerate(cases):
        loss, slope = naive(*case)
        assert found.loss[index].item() == pytest.approx(loss, rel=1e-4, abs=1e-5)
        assert logprobs.grad[index].item() == pytest.approx(slope, rel=1e-4, abs=1e-5)


def test_on_policy_the_gradient_is_minus_the_advantage():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    clipped_token_loss(logprobs, logprobs.detach(), torch.tensor([3.0, -0.5]), SETTINGS).loss.sum().backward()
    assert logprobs.grad.tolist() == [-3.0, 0.5]


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high", "out"),
    [
        (1.5, 1.0, False, True, False),
        (1.5, -1.0, False, False, False),
        (0.5, 1.0, False, False, False),
        (0.5, -1.0, True, False, False),
        (1e3, 1.0, False, True, True),
        (1e-5, -1.0, True, False, True),
    ],
)
def test_the_gauges_say_which_guard_acted(ratio, advantage, low, high, out):
    found = clipped_token_loss(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), SETTINGS)
    assert (bool(found.clipped_low), bool(found.clipped_high), bool(found.left_out)) == (low, high, out)


def test_a_logprob_that_is_not_a_number_is_left_out():
    found = clipped_token_loss(torch.tensor([float("nan")]), torch.zeros(1), torch.ones(1), SETTINGS)
    assert bool(found.left_out) and found.loss.item() == 0.0
