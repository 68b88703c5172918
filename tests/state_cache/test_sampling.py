"""Start positions: drawn evenly, by seed and step alone, for powers that can play."""

import json
from collections import Counter

import pytest

from state_cache.sampling import sample_start_positions
from telemetry.errors import InputError


def test_a_draw_depends_on_seed_and_step_alone(small) -> None:
    _, train, _ = small
    forwards = [sample_start_positions(train, 8, seed=3, step=step) for step in range(5)]
    backwards = [sample_start_positions(train, 8, seed=3, step=step) for step in reversed(range(5))]
    assert forwards == backwards[::-1]
    assert len({tuple(snapshot.snapshot_id for snapshot, _ in drawn) for drawn in forwards}) == 5
    assert sample_start_positions(train, 8, seed=4, step=0) != forwards[0]


@pytest.mark.parametrize("rounds", [1, 3])
def test_no_position_comes_twice_before_all_were_drawn(small, rounds: int) -> None:
    _, train, _ = small
    drawn = sample_start_positions(train, rounds * len(train), seed=0, step=0)
    assert set(Counter(snapshot.snapshot_id for snapshot, _ in drawn).values()) == {rounds}
    assert len({snapshot.snapshot_id for snapshot, _ in sample_start_positions(train, 20, seed=0, step=0)}) == 20


def test_every_power_with_units_is_drawn_alike_and_no_other(small) -> None:
    _, train, _ = small
    drawn = Counter(
        (snapshot.snapshot_id, power)
        for step in range(200)
        for snapshot, power in sample_start_positions(train, len(train), seed=1, step=step)
    )
    for snapshot in train:
        with_units = {own["name"] for own in json.loads(snapshot.position)["powers"] if own["units"]}
        counts = {power: times for (name, power), times in drawn.items() if name == snapshot.snapshot_id}
        assert counts.keys() == with_units
        assert all(abs(times - 200 / len(with_units)) < 30 for times in counts.values())


def test_nothing_to_draw_from_is_said_in_a_sentence() -> None:
    with pytest.raises(InputError, match="no positions to draw from"):
        sample_start_positions([], 1, seed=0, step=0)
