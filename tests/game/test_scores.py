"""Scores by hand, components that add up, and a horizon counted in game years."""

import random
from itertools import pairwise

import pytest

from game.board import POWERS
from game.scores import COMPONENTS, Standing, components, horizon_reached, standing
from telemetry.errors import InputError


@pytest.mark.parametrize(
    ("centres", "power", "share", "survival"),
    [
        ((3, 3, 3, 3, 3, 4, 3), "RUSSIA", 16 / 70, 1.0),
        ((3, 3, 3, 3, 3, 4, 3), "AUSTRIA", 9 / 70, 1.0),
        ((17, 0, 0, 0, 0, 0, 17), "TURKEY", 0.5, 1.0),
        ((17, 0, 0, 0, 0, 0, 17), "FRANCE", 0.0, 0.0),
        ((18, 16, 0, 0, 0, 0, 0), "AUSTRIA", 1.0, 1.0),
        ((18, 16, 0, 0, 0, 0, 0), "ENGLAND", 0.0, 1.0),
        ((0,) * 7, "ENGLAND", 0.0, 0.0),
    ],
)
def test_shares_by_hand(centres: tuple[int, ...], power: str, share: float, survival: float) -> None:
    now = Standing(centres=centres)
    assert now.sos_share(power) == pytest.approx(share)
    assert now.survival(power) == survival


def test_what_changed_by_hand() -> None:
    before, after = Standing(centres=(3, 3, 3, 3, 3, 4, 3)), Standing(centres=(5, 0, 3, 3, 3, 4, 3))
    assert components(before, after, "AUSTRIA") == pytest.approx(
        {"centres_gained": 2.0, "sos_share": 25 / 77 - 9 / 70, "survival": 0.0}
    )
    assert components(before, after, "ENGLAND") == pytest.approx({"centres_gained": -3.0, "sos_share": -9 / 70, "survival": -1.0})
    assert tuple(components(before, after, "ITALY")) == COMPONENTS


def test_components_telescope(self_play) -> None:
    """Over any consecutive stretches of real games they add up to the final standing minus the first."""
    rng = random.Random(0)
    for seed in range(2):
        line = [standing(board) for board, _, _ in self_play(seed, phases=30)]
        cuts = sorted(rng.sample(range(1, len(line) - 1), 6))
        moments = [line[0], *(line[cut] for cut in cuts), line[-1]]
        for power in POWERS:
            parts = [components(before, after, power) for before, after in pairwise(moments)]
            at = POWERS.index(power)
            final = {
                "centres_gained": line[-1].centres[at] - line[0].centres[at],
                "sos_share": line[-1].sos_share(power) - line[0].sos_share(power),
                "survival": (line[-1].centres[at] > 0) - (line[0].centres[at] > 0),
            }
            assert {name: sum(part[name] for part in parts) for name in COMPONENTS} == pytest.approx(final)


def test_a_standing_is_what_the_board_says(self_play) -> None:
    for board, _, _ in self_play(1, phases=15):
        assert standing(board).centres == tuple(len(board.centres()[power]) for power in POWERS)


@pytest.mark.parametrize(
    ("start", "phase", "years", "reached"),
    [
        ("S1903M", "S1903M", 1, False),
        ("S1903M", "W1903A", 1, False),
        ("S1903M", "S1904M", 1, True),
        ("F1903M", "S1904R", 1, False),
        ("F1903M", "F1904M", 1, True),
        ("F1903R", "F1904M", 1, False),
        ("F1903R", "W1904A", 1, True),
        ("W1903A", "W1906A", 3, True),
        ("W1903A", "F1906R", 3, False),
        ("W1903A", "S1907M", 3, True),
        ("S1903M", "COMPLETED", 3, True),
        ("S1903M", "S1903M", 0, True),
    ],
)
def test_the_horizon_counts_game_years_from_the_forks_phase(start: str, phase: str, years: int, reached: bool) -> None:
    assert horizon_reached(start, phase, years) is reached


@pytest.mark.parametrize("name", ["", "1903", "S1903A", "X1903M", "SPRING 1903 MOVEMENT", "SxxxxM"])
def test_a_name_that_is_no_phase_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="not the name of a phase"):
        horizon_reached("S1903M", name, 1)
