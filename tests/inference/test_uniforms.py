"""The random numbers of draws are those of splitmix64, and even over seeds and places."""

import numpy as np
import pytest

from inference.uniforms import seed_array, uniforms


@pytest.mark.parametrize(
    ("seed", "published"),
    [
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]),
    ],
)
def test_the_numbers_of_a_seed_are_the_outputs_of_splitmix64(seed: int, published: list[int]):
    found = uniforms(seed_array([seed] * len(published)), np.arange(len(published)))
    assert found.tolist() == [(bits >> 11) / 2**53 for bits in published]


def one_by_one(seed: int, place: int) -> float:
    """The definition, in Python's integers."""
    state = seed
    for _ in range(place + 1):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return ((mixed ^ (mixed >> 31)) >> 11) / 2**53


def test_any_place_is_reached_without_those_before_it():
    dice = np.random.default_rng(0)
    seeds, places = [0, 1, 2**63 - 1, *dice.integers(2**63, size=50).tolist()], dice.integers(300, size=53)
    expected = [one_by_one(seed, place) for seed, place in zip(seeds, places.tolist(), strict=True)]
    assert uniforms(seed_array(seeds), places).tolist() == expected


@pytest.mark.parametrize("along", ["seeds", "places"])
def test_numbers_are_even_over_neighbouring_seeds_and_places(along: str):
    steps, same = np.arange(100_000), np.full(100_000, 7)
    seeds, places = (steps, same) if along == "seeds" else (same, steps)
    found = uniforms(seed_array(seeds.tolist()), places)
    assert found.min() >= 0 and found.max() < 1
    counts = np.histogram2d(found[:-1], found[1:], bins=16, range=[[0, 1], [0, 1]])[0]
    expected = len(found[1:]) / 256
    # 255 degrees of freedom: mean 255, deviation 23.
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 4 * 23
