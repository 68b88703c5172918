"""A step's positions are the same whenever they are drawn: what counts as known by then is a matter of its number alone."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.resources import PRODUCER, Resources
from pipeline.start_positions import producer_positions, start_positions
from rollouts.settings import RolloutSettings
from state_cache.sampling import FLOOR, learnable_weights, sample_start_positions
from storage.closed_query import ask_closed
from storage.learnable import PastGroups
from tests.task_resources import resources_of

GROUPS, LAG = 4, 2

LEARNABLE = f"""
WITH known AS (SELECT *, coalesce(spread, avg(spread) OVER ()) AS score FROM positions)
SELECT snapshot_id, coalesce({FLOOR} / count(*) OVER () + (1 - {FLOOR}) * score / sum(score) OVER (), 1) AS weight FROM known
"""


class Taught:
    """In the place of the run's rows: remembers what it was asked, and has something to tell of every group before."""

    def __init__(self, snapshot_ids: list[str]) -> None:
        self.asked: list[tuple[str, int]] = []
        self._ids = snapshot_ids

    def before(self, producer: str, start_group: int) -> dict[str, PastGroups]:
        self.asked.append((producer, start_group))
        return {name: PastGroups(1, float(start_group + place), 0.0) for place, name in enumerate(self._ids[:start_group])}

    def ask_closed(self, query: str, **of_query: Any) -> list[tuple[Any, ...]]:
        return ask_closed(query, **of_query)


@pytest.fixture
def resources(tmp_path: Path, positions) -> Any:
    def make(sampling: str) -> Resources:
        rollouts = RolloutSettings.model_validate({"start_groups": GROUPS, "sampling": sampling})
        taught = Taught([snapshot.snapshot_id for snapshot in positions])
        return resources_of(tmp_path / "run", positions, rollouts, past_returns=taught, max_policy_lag=LAG)

    return make


def test_a_learnable_draw_looks_at_steps_that_were_whole_before_it_could_begin(resources):
    """Step 9 may begin while the trainer stands before step 7, so it must not know of more than step 6."""
    run = resources("learnable")
    drawn = start_positions(run, 9)
    assert run.past_returns.asked == [(PRODUCER, 6 * GROUPS)]
    spreads = {name: groups.spread for name, groups in run.past_returns.before(PRODUCER, 6 * GROUPS).items()}
    weights = learnable_weights(run.cache.train, spreads)
    assert drawn == sample_start_positions(run.cache.train, GROUPS, 5, 9, sampling="learnable", weights=weights)
    assert drawn != sample_start_positions(run.cache.train, GROUPS, 5, 9)


@pytest.mark.parametrize("step", [1, 2, 1 + LAG])
def test_the_first_steps_know_of_nothing(resources, step: int):
    run = resources("learnable")
    assert start_positions(run, step) == sample_start_positions(run.cache.train, GROUPS, 5, step)
    assert run.past_returns.asked == [(PRODUCER, 0)]


def test_steps_in_any_order_draw_what_they_drew_before(resources):
    run, again = resources("learnable"), resources("learnable")
    forwards = [start_positions(run, step) for step in range(1, 8)]
    assert [start_positions(again, step) for step in reversed(range(1, 8))] == forwards[::-1]


def test_a_query_sees_what_a_learnable_draw_sees_and_can_draw_as_it_does(resources):
    by_query, learnable = resources(LEARNABLE), resources("learnable")
    assert start_positions(by_query, 9) == start_positions(learnable, 9)
    assert by_query.past_returns.asked == learnable.past_returns.asked
    assert producer_positions(by_query, "b", 3, 9, 9) == producer_positions(learnable, "b", 3, 9, 9)


@pytest.mark.parametrize("sampling", ["uniform", "stratified"])
def test_other_draws_ask_no_rows(resources, sampling: Any):
    run = resources(sampling)
    expected = sample_start_positions(run.cache.train, GROUPS, 5, 9, sampling=sampling)
    assert start_positions(run, 9) == expected and run.past_returns.asked == []
