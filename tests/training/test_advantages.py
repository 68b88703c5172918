"""Advantages against loops, what they must never do, and what moves from step to step."""

import json
import math
from collections import defaultdict
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.advantages import MovingMeans, advantages_of, leave_one_out
from training.settings import TrainingSettings

RETURNS, GROUPS = np.array([3.0, 0.0, 1.0, 4.0, 4.0, 1.0]), np.array([0, 0, 0, 1, 1, 1])
POWERS = ["FRANCE"] * 3 + ["ITALY"] * 3


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


def test_the_better_decision_has_the_positive_advantage():
    assert leave_one_out(np.array([2.0, 0.0]), np.array([0, 0])).tolist() == [2.0, -2.0]


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        leave_one_out(np.array([1.0, 2.0, 3.0]), np.array([0, 0, 1]))


def of(steps: list[list[tuple[str, int, float]]], settings: TrainingSettings) -> list[list[float]]:
    """Advantages of some steps, each a list of (power, group, return)."""
    moving, found = MovingMeans(), []
    for rows in steps:
        powers, groups, returns = zip(*rows, strict=True)
        advantages, moving = advantages_of(np.array(returns), np.array(groups), powers, settings, moving)
        found.append(advantages.tolist())
    return found


def by_loop(steps: list[list[tuple[str, int, float]]], settings: TrainingSettings) -> list[list[float]]:
    """The same, written down once more."""
    means: dict[str, float] = {}
    square, found, keeps = None, [], settings.moving_decay
    for rows in steps:
        members = defaultdict(list)
        for _, group, value in rows:
            members[group].append(value)
        raw = []
        for power, group, value in rows:
            others = (sum(members[group]) - value) / (len(members[group]) - 1)
            known = settings.advantage_baseline == "power" and power in means
            raw.append(value - (means[power] if known else others))
        now = sum(value**2 for value in raw) / len(raw)
        by = {"none": 1.0, "batch": now, "running": now if square is None else square}[settings.advantage_scale]
        found.append([value / math.sqrt(by or 1.0) for value in raw])
        square = now if square is None else keeps * square + (1 - keeps) * now
        for power in {power for power, _, _ in rows}:
            mine = [value for other, _, value in rows if other == power]
            mean = sum(mine) / len(mine)
            means[power] = keeps * means[power] + (1 - keeps) * mean if power in means else mean
    return found


eighths = st.integers(-72, 72).map(lambda whole: whole / 8)
figures = st.tuples(st.sampled_from(["FRANCE", "ITALY", "TURKEY"]), eighths, eighths)
a_step = st.lists(figures, min_size=1, max_size=6).map(
    lambda pairs: [(power, group, value) for group, (power, *two) in enumerate(pairs) for value in two]
)


@pytest.mark.parametrize("scale", ["none", "batch", "running"])
@pytest.mark.parametrize("baseline", ["group", "power"])
@given(steps=st.lists(a_step, min_size=1, max_size=4), keeps=st.floats(0, 0.99))
def test_every_choice_is_that_of_the_loop(baseline: str, scale: str, steps: list, keeps: float):
    settings = TrainingSettings(advantage_baseline=baseline, advantage_scale=scale, moving_decay=keeps)
    for found, expected in zip(of(steps, settings), by_loop(steps, settings), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", ["batch", "running"])
def test_scaled_advantages_do_not_hang_on_the_unit_of_the_return(scale: str):
    settings = TrainingSettings(advantage_scale=scale)
    ones, tens = (
        of([[(p, g, unit * r) for p, g, r in zip(POWERS, GROUPS, RETURNS, strict=True)]] * 2, settings) for unit in (1, 10)
    )
    np.testing.assert_allclose(ones, tens, rtol=1e-5)
    assert np.square(ones[0]).mean() == pytest.approx(1, rel=1e-5)


def test_no_decision_s_own_return_is_in_what_it_is_compared_with():
    """Raising one return by one raises its own advantage by exactly one: it is in neither baseline."""
    for baseline in ("group", "power"):
        settings = TrainingSettings(advantage_baseline=baseline)
        first = [(power, group, value) for power, group, value in zip(POWERS, GROUPS, RETURNS, strict=True)]
        raised = [(power, group, value + (place == 4)) for place, (power, group, value) in enumerate(first)]
        before, after = of([first, first], settings)[1], of([first, raised], settings)[1]
        assert after[4] - before[4] == pytest.approx(1, abs=1e-6)


def test_without_any_spread_nothing_is_divided_by_zero():
    for scale in ("batch", "running"):
        assert of([[("FRANCE", 0, 1.0), ("FRANCE", 0, 1.0)]] * 2, TrainingSettings(advantage_scale=scale)) == [[0, 0], [0, 0]]


def test_a_step_without_rows_moves_nothing():
    before = MovingMeans(power_means={"FRANCE": 1.5}, mean_square=2.0)
    found, after = advantages_of(np.empty(0), np.empty(0, np.int64), [], TrainingSettings(), before)
    assert len(found) == 0 and after == before


def test_moving_figures_come_back_from_json_bit_for_bit():
    _, moving = advantages_of(RETURNS / 3, GROUPS, POWERS, TrainingSettings(), MovingMeans())
    assert MovingMeans(**json.loads(json.dumps(asdict(moving)))) == moving
