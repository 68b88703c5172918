"""Advantages against loops, and what they must never do."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entente.training.branching import branching_indices
from entente.training.objective import advantages_of, leave_one_out, own_shares
from entente.training.settings import TrainingSettings
from tests.training import loss_oracle
from tests.training.batches import batch_of, three_levels


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


@given(seed=st.integers(0, 50), computed=st.sampled_from([0.0, 0.3, 1.0]))
def test_an_order_s_own_share_is_that_of_the_loop(seed: int, computed: float):
    """Some rows lack the gains, and some whole groups: these keep their decision's advantage, and so do forced tokens."""
    dice, batch = np.random.default_rng(seed), three_levels(seed)
    gains = dice.integers(-2, 3, len(batch.behaviour_logprobs)).astype(np.float32)
    lacking = np.repeat(dice.random(12) >= computed, np.diff(batch.completion_offsets))
    batch = replace(batch, gains_if_held=np.where(lacking, np.nan, gains).astype(np.float32))
    advantages = leave_one_out(dice.normal(size=12), batch.advantage_groups).astype(np.float32)
    places, rows = branching_indices(batch, np.arange(12))
    held = zip(rows.tolist(), batch.advantage_groups[rows].tolist(), batch.gains_if_held[places].tolist(), strict=True)
    expected = np.zeros(len(gains))
    expected[places] = loss_oracle.own_shares(list(held), advantages.tolist())
    found = own_shares(batch, advantages)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert computed < 1 or found.any()


def test_a_control_variate_takes_away_what_orders_did_not_do_and_keeps_what_they_did():
    """Returns are sums over a decision's independent orders: left is each order's own part, with less noise, and no bias."""
    dice = np.random.default_rng(0)
    rows, orders = 4000, 4
    made = dice.normal(size=(rows, orders))
    batch = batch_of([([1], [2] * orders)] * rows, groups=[row // 8 for row in range(rows)])
    sets = np.arange(rows * orders + 1) * 2
    batch = replace(
        batch,
        legal_ids=np.tile(np.array([2, 3], np.int32), rows * orders),
        legal_offsets=sets,
        gains_if_held=(made.sum(1, keepdims=True) - made).ravel().astype(np.float32),
    )
    advantages = leave_one_out(made.sum(1), batch.advantage_groups).astype(np.float32)
    shares = own_shares(batch, advantages)
    assert shares is not None
    whole, own = np.repeat(advantages, orders), np.repeat(advantages, orders) + shares
    assert np.square(own).mean() < 0.4 * np.square(whole).mean()
    assert own @ made.ravel() == pytest.approx(whole @ made.ravel(), rel=0.05)


def test_without_computed_gains_no_order_has_a_share_of_its_own():
    assert own_shares(three_levels(), np.zeros(12, np.float32)) is None
