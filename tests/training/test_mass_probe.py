"""Which tokens are probed for their legal mass."""

from fractions import Fraction

import numpy as np
import pytest

from training.mass_probe import SHARE, probed


@pytest.mark.parametrize("first", [0, 12345, 10_000_000])
@pytest.mark.parametrize("length", [50, 400, 3000])
def test_every_stretch_of_a_batch_has_its_share_of_probes(first: int, length: int):
    share = probed(np.arange(first, first + length)).mean()
    assert abs(share - SHARE) < 3 / length + 0.01


def test_a_token_is_probed_for_its_place_alone():
    places = np.array([17, 3, 90, 8, 2, 4000])
    assert (
        probed(places[::-1]).tolist() == probed(places).tolist()[::-1] == [bool(probed(np.array([p]))[0]) for p in places[::-1]]
    )


def test_the_choice_is_that_of_exact_arithmetic():
    golden = Fraction(0.6180339887498949)
    exact = [(place * golden) % 1 < Fraction(SHARE) for place in range(2000)]
    assert probed(np.arange(2000)).tolist() == exact
