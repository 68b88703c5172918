"""The entropy weight follows the gap to its target, within its bounds, and finds a weight that holds the target."""

import math

import pytest

from training.entropy_target import RATE, WEIGHT_MAX, entropy_weight, next_entropy_weight
from training.settings import TrainingSettings

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
