"""Scripted players return legal sets, depend only on their arguments, and rank by strength as expected."""

import hashlib
import random
from collections import Counter
from math import comb

import pytest

from entente.game.board import POWERS, Board
from entente.game.dumbbot import _Position
from entente.game.geography import geography, province
from entente.game.legal import LegalOrders, OrderKind
from entente.game.scripted import PLAYERS, player
from entente.telemetry.errors import InputError


@pytest.mark.parametrize("name", sorted(PLAYERS))
def test_every_set_is_legal_and_taken_by_the_engine(name: str) -> None:
    rng = random.Random(f"seed of {name}")
    for _ in range(4):
        board = Board.start()
        for _ in range(25):
            if board.is_over:
                break
            legal = board.legal_orders()
            orders = {power: player(name)(own, rng, board) for power, own in legal.items()}
            assert all(legal[power].admits(own) for power, own in orders.items())
            result = board.step(orders)
            assert not any(result.rejected.values())
            assert result.orders == {power: tuple(own) for power, own in orders.items()}
            # In movement phases a support of a move that was not made is void; in other phases void is an error.
            assert result.phase.endswith("M") or not any("void" in own for own in result.results.values())


def test_the_uniform_player_draws_every_legal_subset_alike() -> None:
    """Up to two builds on three sites: 1 + 3 + 3 ways. Three disbands of four units: 4 ways."""
    build = LegalOrders(power="FRANCE", kind=OrderKind.BUILD, sites=("B", "M", "P"), options=(("b",), ("m",), ("p",)), picks=2)
    disband = LegalOrders(
        power="FRANCE",
        kind=OrderKind.DISBAND,
        sites=tuple("ABCD"),
        options=(("a",), ("b",), ("c",), ("d",)),
        picks=3,
    )
    rng = random.Random(0)
    for own in (build, disband):
        assert own.count() == (1 + 3 + 3 if own is build else comb(4, 3))
        drawn = Counter(tuple(player("random")(own, rng)) for _ in range(1000 * own.count()))
        assert len(drawn) == own.count()
        assert all(850 < times < 1150 for times in drawn.values())


def test_the_player_that_repeats_gives_each_unit_its_order_of_the_last_season_where_it_is_legal() -> None:
    """A unit that moved holds; one that bounced tries again, and so does one that supports it."""
    board = Board.start()
    board.step({"FRANCE": ["F BRE - MAO", "A MAR S A PAR - BUR", "A PAR - BUR"], "GERMANY": ["A MUN - BUR", "A BER S A MUN"]})

    def ordered(power: str) -> list[str]:
        return player("repeat")(board.legal_orders()[power], random.Random(0), board)

    assert ordered("FRANCE") == ["A BUR H", "F MAO H", "A MAR H"]
    assert ordered("GERMANY") == ["A BER S A MUN", "F KIE H", "A MUN - BUR"]
    assert ordered("ITALY") == ["F NAP H", "A ROM H", "A VEN H"]


@pytest.mark.parametrize("name", ["repeat", "territorial", "dumbbot"])
def test_a_player_that_looks_at_the_board_says_so_where_there_is_none(name: str) -> None:
    (own, *_) = Board.start().legal_orders().values()
    with pytest.raises(InputError, match=f"'{name}' needs the board"):
        player(name)(own, random.Random(0))


def test_the_territorial_player_goes_for_centres_not_owned_now_stays_on_them_and_then_goes_on() -> None:
    board = Board.start()
    board.step({"FRANCE": ["A PAR - GAS"]})
    assert all("A GAS - SPA" in own or "A MAR - SPA" in own for own in _drawn("territorial", "FRANCE", board))
    board = Board.start()
    board.step({"FRANCE": ["A MAR - SPA"]})
    assert all("A SPA H" in own for own in _drawn("territorial", "FRANCE", board))
    while board.phase != "S1902M":
        board.step({})
    assert "SPA" in board.centres()["FRANCE"]
    assert all("A SPA - POR" in own for own in _drawn("territorial", "FRANCE", board))


def _worths_by_loops(board: Board, power: str) -> dict[tuple[str, str], float]:
    """Oracle: the worth of each place for `power`, by loops over the map, without matrices and without what powers share."""
    attack, defence = {"S": 700, "F": 600, "W": 700}[board.season], {"S": 300, "F": 400, "W": 1000}[board.season]
    weights = (
        *{"S": (0.1, 1.0), "F": (1.0, 0.1), "W": (1.0, 0.1)}[board.season],
        *(0.03, 0.01, 0.006, 0.005, 0.004, 0.003, 0.002, 0.001),
    )
    reach, near = geography().reach, Counter()
    for name, units in board.units().items():
        for unit in units:
            near.update((name, where) for where in {province(unit[2:]), *map(province, reach[unit[0], unit[2:]])})
    size = {name: len(own) ** 2 + 4 * len(own) + 16 for name, own in board.centres().items()}
    owner = {centre: name for name, own in board.centres().items() for centre in own}
    value = dict.fromkeys(reach, 0.0)
    for place in reach:
        centre = province(place[1])
        if owner.get(centre) == power:
            value[place] = defence * max((size[rival] for rival in size if rival != power and near[rival, centre]), default=0)
        elif centre in geography().centres:
            value[place] = attack * (size[owner[centre]] if centre in owner else 37)
    total = dict.fromkeys(reach, 0.0)
    for weight in weights:
        total = {place: total[place] + weight * value[place] for place in reach}
        value = {place: (value[place] + sum(value[place[0], step] for step in reach[place])) / 5 for place in reach}
    for place in reach:
        where = province(place[1])
        rivals = max(near[rival, where] for rival in size if rival != power)
        total[place] += 1000 * near[power, where] - 1000 * rivals
    return total


def test_dumbbot_values_places_as_loops_over_the_map_do() -> None:
    rng, board = random.Random(2), Board.start()
    while board.year < 1903:
        for power in POWERS[:: 3 if board.year == 1901 else 6]:
            view = board.once(_Position).view(power)
            for place, worth in _worths_by_loops(board, power).items():
                assert view.worth(*place) == pytest.approx(worth, rel=1e-9, abs=1e-6), (board.phase, power, place)
        board.step({power: player("dumbbot")(own, rng, board) for power, own in board.legal_orders().items()})


def test_dumbbot_orders_what_it_ordered_when_matches_were_stored() -> None:
    """The digest was computed before powers shared what they compute: a faster way must not change a single order."""
    found = hashlib.sha256()
    for seed in range(2):
        board = Board.start()
        while board.year < 1904:
            legal = board.legal_orders().items()
            orders = {
                power: player("dumbbot")(own, random.Random(f"{seed} {board.phase} {power}"), board) for power, own in legal
            }
            found.update(repr(orders).encode())
            board.step(orders)
    assert found.hexdigest()[:16] == "5bd820b00fae6693"


def test_dumbbot_never_retreats_two_units_to_one_place(trieste_falls: Board) -> None:
    own = LegalOrders(
        power="AUSTRIA",
        kind=OrderKind.RETREAT,
        sites=("A SER", "F TRI"),
        options=(("A SER D", "A SER R ALB"), ("F TRI D", "F TRI R ALB")),
        picks=2,
    )
    assert player("dumbbot")(own, random.Random(0), trieste_falls) == ["A SER R ALB", "F TRI D"]


def _drawn(name: str, power: str, board: Board) -> list[list[str]]:
    return [player(name)(board.legal_orders()[power], random.Random(seed), board) for seed in range(40)]
