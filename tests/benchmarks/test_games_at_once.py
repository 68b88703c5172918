"""The sweep of concurrent games names the smallest number that is nearly as good as the best."""

import pytest

from benchmarks.games_at_once import summary


@pytest.mark.parametrize(
    ("speed", "best", "gain"),
    [
        ({1: 10.0, 4: 38.0, 16: 97.0, 64: 100.0}, 16, 9.7),
        ({1: 10.0, 4: 38.0, 16: 90.0, 64: 100.0}, 64, 10.0),
        ({1: 10.0, 4: 10.1}, 1, 1.0),
    ],
    ids=["within a twentieth", "beyond a twentieth", "no gain"],
)
def test_the_smallest_number_within_a_twentieth_of_the_best(speed: dict[int, float], best: int, gain: float):
    assert summary(speed) == {"best_at_once": best, "gain_over_one": pytest.approx(gain)}
