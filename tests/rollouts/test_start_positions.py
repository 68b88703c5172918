"""A step's positions are the same whenever they are drawn: what counts as known by then is a matter of its number alone."""

from pathlib import Path
from typing import Any

import pytest

from entente.rollouts.play import start_positions
from entente.rollouts.resources import PRODUCER
from entente.rollouts.settings import RolloutSettings
from state_cache.sampling import learnable_weights, sample_start_positions
from tasks.resources import Resources
from tests.task_resources import resources_of

GROUPS, LAG = 4, 2


class Taught:
    """In the place of the run's rows: remembers what it was asked, and has something to tell of every group before."""

    def __init__(self, snapshot_ids: list[str]) -> None:
        self.asked: list[tuple[str, int]] = []
        self._ids = snapshot_ids

    def spreads_before(self, producer: str, start_group: int) -> dict[str, float]:
        self.asked.append((producer, start_group))
        return {name: float(start_group + place) for place, name in enumerate(self._ids[:start_group])}


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
    weights = learnable_weights(run.cache.train, run.past_returns.spreads_before(PRODUCER, 6 * GROUPS))
    assert drawn == sample_start_positions(run.cache.train, GROUPS, 5, 9, sampling="learnable", weights=weights)
    assert drawn != sample_start_positions(run.cache.train, GROUPS, 5, 9)


@pytest.mark.parametrize("step", [1, 2, 1 + LAG])
def test_the_first_steps_know_of_nothing(resources, step: int):
    run = resources("learnable")
    assert start_positions(run, step) == sample_start_positions(run.cache.train, GROUPS, 5, step)
    assert run.past_returns.asked == [(PRODUCER, 0)]
