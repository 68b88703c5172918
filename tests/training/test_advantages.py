"""Advantages against loops, and what they must never do."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entente.training.advantages import advantages_of, leave_one_out
from entente.training.settings import TrainingSettings


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-20, 20)), min_size=1, max_size=40))
def test_each_decision_is_compared_with_the_mean_of_the_others(rows):
    rows = rows + [(group, 1.5) for group, _ in rows]  # every group has at least two members
    groups, returns = np.array([group for group, _ in rows]), np.array([value for _, value in rows])
    expected = []
    for index, (group, value) in enumerate(rows):
        others = [other for place, (g, other) in enumerate(rows) if g == group and place != index]
        expected.append(value - sum(others) / len(others))
    np.testing.assert_allclose(leave_one_out(returns, groups), expected, atol=1e-9)


def test_they_sum_to_zero_in_each_group_and_ignore_a_shift_of_it():
    groups, returns = np.array([7, 7, 7, 2, 2]), np.array([1.0, 4.0, 0.0, 3.0, 5.0])
    advantages = leave_one_out(returns, groups)
    assert advantages[:3].sum() == pytest.approx(0) and advantages[3:].sum() == pytest.approx(0)
    np.testing.assert_allclose(leave_one_out(returns + 10 * (groups == 7), groups), advantages)


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        leave_one_out(np.array([1.0, 2.0, 3.0]), np.array([0, 0, 1]))


@pytest.mark.parametrize("scale", ["none", "batch"])
@given(pairs=st.lists(st.tuples(st.integers(-72, 72), st.integers(-72, 72)), min_size=1, max_size=6))
def test_every_scale_is_that_of_the_loop(scale: str, pairs: list):
    returns = [value / 8 for pair in pairs for value in pair]
    groups = [group for group in range(len(pairs)) for _ in range(2)]
    raw = [returns[place] - returns[place ^ 1] for place in range(len(returns))]
    by = math.sqrt(sum(value**2 for value in raw) / len(raw)) if scale == "batch" else 1.0
    found = advantages_of(np.array(returns), np.array(groups), TrainingSettings(advantage_scale=scale))
    np.testing.assert_allclose(found, [value / (by or 1.0) for value in raw], rtol=1e-4, atol=1e-5)


def test_a_step_without_rows_has_no_advantages():
    assert len(advantages_of(np.empty(0), np.empty(0, np.int64), TrainingSettings(advantage_scale="batch"))) == 0
