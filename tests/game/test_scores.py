"""Scores computed by hand, components that add up, and the horizon in game years."""

import random
from itertools import pairwise

import pytest

from entente.game.board import POWERS, Board
from entente.game.scores import PowerScores, components, compute_power_scores, horizon_reached
from entente.telemetry.errors import InputError
from storage.arrow_files import COMPONENTS


@pytest.mark.parametrize(
    ("centres", "power", "share", "draw", "survival"),
    [
        ((3, 3, 3, 3, 3, 4, 3), "RUSSIA", 16 / 70, 1 / 7, 1.0),
        ((17, 0, 0, 0, 0, 0, 17), "FRANCE", 0.0, 0.0, 0.0),
        ((17, 0, 0, 0, 0, 3, 14), "RUSSIA", 9 / 494, 1 / 3, 1.0),
        ((18, 16, 0, 0, 0, 0, 0), "AUSTRIA", 1.0, 1.0, 1.0),
        ((18, 16, 0, 0, 0, 0, 0), "ENGLAND", 0.0, 0.0, 1.0),
    ],
)
def test_shares_by_hand(centres: tuple[int, ...], power: str, share: float, draw: float, survival: float) -> None:
    now = PowerScores(centres=centres)
    assert (now.sos_share(power), now.draw_share(power), now.survival(power)) == pytest.approx((share, draw, survival))


def test_components_by_hand() -> None:
    before, after = PowerScores(centres=(3, 3, 3, 3, 3, 4, 3)), PowerScores(centres=(5, 0, 3, 3, 3, 4, 3))
    found = components(before, after, "AUSTRIA")
    assert (found["centres_gained"], found["survival"]) == (2.0, 0.0)
    assert (found["sos_share"], found["draw_share"]) == pytest.approx((25 / 77 - 9 / 70, 1 / 6 - 1 / 7))
    found = components(before, after, "ENGLAND")
    assert (found["centres_gained"], found["survival"]) == (-3.0, -1.0)
    assert (found["sos_share"], found["draw_share"]) == pytest.approx((-9 / 70, -1 / 7))
    assert tuple(components(before, after, "ITALY")) == COMPONENTS


def test_leader_gap_and_balance_by_hand() -> None:
    now = PowerScores(centres=(10, 7, 6, 1, 0, 0, 0))
    assert [now.leader_gap(power) for power in POWERS[:4]] == pytest.approx([0, 0, -1 / 18, -6 / 18])
    even = 1 - (((4**2 + 1 + 0 + 5**2) / 4) ** 0.5) / 6  # around a mean of six
    assert [now.balance(power) for power in POWERS[:4]] == pytest.approx([0, even, even, even])


def test_who_dislodged_whom_by_hand(trieste_falls: Board) -> None:
    """Italy took Trieste with support: one unit dislodged by Italy, one lost by Austria."""
    board = Board.start()
    now = start = compute_power_scores(board)
    for orders in (["A VEN - TYR", "A ROM - VEN"], ["A VEN - TRI", "A TYR S A VEN - TRI"]):
        before, played = now, board.step({"ITALY": orders})
        now = compute_power_scores(board, before, played)
    assert board.units() == trieste_falls.units()
    assert played.dislodged == {"F TRI": "ITALY"} and played.owners["F TRI"] == "AUSTRIA"
    for power in POWERS:
        found = components(start, now, power)
        assert found["units_dislodged"] == (power == "ITALY")
        assert found["units_driven_out"] == (power == "AUSTRIA")


def test_an_army_that_replaces_an_army_is_not_taken_for_it() -> None:
    """Both armies are called "A TYR"; confusing them would invert the reward."""
    board = Board.start()
    now = start = compute_power_scores(board)
    for orders in (
        {"ITALY": ["A VEN - TYR"], "GERMANY": ["A MUN - BOH"], "AUSTRIA": ["A VIE - GAL"]},
        {"GERMANY": ["A BER - MUN"], "ITALY": ["A TYR H"]},
        {},
        {"GERMANY": ["A BOH - TYR", "A MUN S A BOH - TYR"], "ITALY": ["A TYR H"]},
    ):
        before, played = now, board.step(orders)
        now = compute_power_scores(board, before, played)
    assert "A TYR" in board.units()["GERMANY"] and played.dislodged == {"A TYR": "GERMANY"}
    assert components(start, now, "GERMANY")["units_dislodged"] == components(start, now, "ITALY")["units_driven_out"] == 1
    assert components(start, now, "ITALY")["units_dislodged"] == components(start, now, "GERMANY")["units_driven_out"] == 0


def test_void_and_bounced_orders_by_hand() -> None:
    """Two armies meet in Burgundy; France supports a move that Germany does not make."""
    board = Board.start()
    start = compute_power_scores(board)
    played = board.step({"FRANCE": ["A PAR - BUR", "A MAR S A MUN - BUR"], "GERMANY": ["A MUN - BUR", "F KIE H"]})
    now = compute_power_scores(board, start, played)
    assert (now.bounced[POWERS.index("FRANCE")], now.bounced[POWERS.index("GERMANY")]) == (1, 0)
    played = board.step({"FRANCE": ["A MAR S A PAR - GAS", "A PAR H"]})
    after = compute_power_scores(board, now, played)
    found = components(now, after, "FRANCE")
    assert (found["orders_void"], found["orders_bounced"]) == (1, 0)


def test_components_telescope(self_play) -> None:
    """Components of consecutive stretches of real games add up to the last power_scores minus the first."""
    rng = random.Random(0)
    for seed in range(2):
        line = [compute_power_scores(board) for board, _, _ in self_play(seed, phases=30)]
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
            assert {name: sum(part[name] for part in parts) for name in final} == pytest.approx(final)
            assert {name: sum(part[name] for part in parts) for name in COMPONENTS} == pytest.approx(
                components(line[0], line[-1], power)
            )


@pytest.mark.parametrize(
    ("start", "phase", "years", "reached"),
    [
        ("S1903M", "S1903M", 1, False),
        ("S1903M", "S1904M", 1, True),
        ("F1903M", "F1903R", 1, False),
        ("F1903M", "W1903A", 1, True),
        ("F1903R", "W1904A", 3, False),
        ("W1903A", "S1906M", 3, False),
        ("W1903A", "W1906A", 3, True),
        ("S1903M", "COMPLETED", 3, True),
    ],
)
def test_the_horizon_counts_the_times_that_centres_were_counted(start: str, phase: str, years: int, reached: bool) -> None:
    assert horizon_reached(start, phase, years) is reached


@pytest.mark.parametrize("name", ["", "S1903A", "SxxxxM"])
def test_a_name_that_is_no_phase_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="not the name of a phase"):
        horizon_reached("S1903M", name, 1)


def test_no_measure_changes_in_a_winter(self_play) -> None:
    """So a fork may end before its last one: no reward component sees what is built or disbanded there."""
    winters = 0
    for seed in range(4):
        for board, _, orders in self_play(seed, phases=40):
            if board.phase_type == "A":
                before, after = compute_power_scores(board), board.fork()
                played = after.step(orders)
                assert compute_power_scores(after, before, played) == before
                winters += 1
    assert winters >= 12
