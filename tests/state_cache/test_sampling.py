"""Start positions are drawn evenly, depend only on seed and step, and have a power with units."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from entente.game.snapshot import units_of_powers
from state_cache.sampling import Sampling, count_strata, sample_start_positions, stratum_of


def test_a_draw_depends_on_seed_and_step_alone(small) -> None:
    _, train, _ = small
    forwards = [sample_start_positions(train, 8, seed=3, step=step) for step in range(5)]
    backwards = [sample_start_positions(train, 8, seed=3, step=step) for step in reversed(range(5))]
    assert forwards == backwards[::-1]
    assert len({tuple(snapshot.snapshot_id for snapshot, _ in sampled) for sampled in forwards}) == 5
    assert sample_start_positions(train, 8, seed=4, step=0) != forwards[0]


@pytest.mark.parametrize("rounds", [1, 3])
def test_no_position_comes_twice_before_all_were_drawn(small, rounds: int) -> None:
    _, train, _ = small
    sampled = sample_start_positions(train, rounds * len(train), seed=0, step=0)
    assert set(Counter(snapshot.snapshot_id for snapshot, _ in sampled).values()) == {rounds}
    assert len({snapshot.snapshot_id for snapshot, _ in sample_start_positions(train, 20, seed=0, step=0)}) == 20


def test_every_power_with_units_is_drawn_alike_and_no_other(small) -> None:
    _, train, _ = small
    sampled = Counter(
        (snapshot.snapshot_id, power)
        for step in range(200)
        for snapshot, power in sample_start_positions(train, len(train), seed=1, step=step)
    )
    for snapshot in train:
        with_units = {own["name"] for own in json.loads(snapshot.position)["powers"] if own["units"]}
        counts = {power: times for (name, power), times in sampled.items() if name == snapshot.snapshot_id}
        assert counts.keys() == with_units
        assert all(abs(times - 200 / len(with_units)) < 30 for times in counts.values())


def test_large_draws_take_a_power_by_the_square_of_its_units(small) -> None:
    _, (snapshot, *_), _ = small
    sampled = Counter(sample_start_positions([snapshot], 1, 1, step, sampling="large")[0][1] for step in range(2000))
    squares = {power: units**2 for power, units in units_of_powers(snapshot).items()}
    assert len(set(squares.values())) > 1 and sampled.keys() <= squares.keys()
    for power, square in squares.items():
        expected = 2000 * square / sum(squares.values())
        assert abs(sampled[power] - expected) < 4.5 * expected**0.5


@pytest.mark.parametrize("sampling", ["uniform", "large"])
def test_a_position_goes_on_with_the_power_that_the_policy_had_there_while_it_has_units(small, sampling: Sampling) -> None:
    _, (snapshot, *_), _ = small
    for power in units_of_powers(snapshot):
        reached = replace(snapshot, power=power)
        assert {sample_start_positions([reached], 1, 1, step, sampling=sampling)[0][1] for step in range(20)} == {power}
    gone = replace(snapshot, power="NOBODY")
    assert len({sample_start_positions([gone], 1, 1, step, sampling=sampling)[0][1] for step in range(50)}) > 1


@pytest.mark.parametrize("count", [1, 5, 40])
def test_stratified_draws_take_every_stratum_alike(small, count: int) -> None:
    _, train, _ = small
    strata = count_strata(train)
    sampled = [s for step in range(100) for s, _ in sample_start_positions(train, count, 0, step, sampling="stratified")]
    assert len(sampled) == 100 * count
    met = Counter(stratum_of(snapshot) for snapshot in sampled)
    expected = 100 * count / len(strata)
    assert met.keys() <= strata.keys() and all(abs(met[each] - expected) < 5 * expected**0.5 + 1 for each in strata)
    once = [s for s, _ in sample_start_positions(train, len(strata), 0, 1, sampling="stratified")]
    assert len({stratum_of(snapshot) for snapshot in once}) == len(strata)
