"""Boards: steps, rejected orders, forks, snapshots and the end of a game."""

import json
from dataclasses import replace

import pytest

from entente.game.adjudicator import Adjudicator
from entente.game.board import POWERS, Board
from entente.game.snapshot import Snapshot, board_key, position_id, units_of_powers
from entente.telemetry.errors import DataError, InputError


def freeze(board: Board) -> Snapshot:
    return board.snapshot(game_id="game-1", seed=5, source="scripted:hold")


def altered(snapshot: Snapshot, **changes: object) -> Snapshot:
    """The snapshot with a changed position and the id of that position."""
    position = json.dumps({**json.loads(snapshot.position), **changes})
    return replace(snapshot, position=position, snapshot_id=position_id(position))


def test_a_step_reports_the_phase_it_played() -> None:
    board = Board.start()
    played = board.step({"FRANCE": ["A PAR - BUR", "A MAR H"], "GERMANY": ["A MUN - BUR"]})
    assert (played.phase, board.phase) == ("S1901M", "F1901M")
    assert played.orders == {"FRANCE": ("A PAR - BUR", "A MAR H"), "GERMANY": ("A MUN - BUR",)}
    assert played.results["A PAR"] == played.results["A MUN"] == ("bounce",)
    assert played.results["F BRE"] == ()
    assert played.rejected == {"FRANCE": 0, "GERMANY": 0}


def test_orders_beyond_the_build_budget_are_rejected() -> None:
    board = Board.start()
    board.step({"FRANCE": ["A MAR - SPA"]})
    board.step({})
    assert board.phase == "W1901A" and board.legal_orders()["FRANCE"].picks == 1
    played = board.step({"FRANCE": ["A MAR B", "F MAR B", "WAIVE"], "ITALY": ["A ROM B"]})
    assert played.orders == {"FRANCE": ("A MAR B",), "ITALY": ()}
    assert played.rejected == {"FRANCE": 2, "ITALY": 1}
    assert board.units()["FRANCE"] == ("F BRE", "A MAR", "A PAR", "A SPA")


def test_legal_orders_are_computed_once_per_phase_and_shared_with_forks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    compute = Adjudicator.get_all_possible_orders
    monkeypatch.setattr(Adjudicator, "get_all_possible_orders", lambda game: calls.append(game.phase) or compute(game))
    board = Board.start()
    legal = board.legal_orders()
    forks = [board.fork() for _ in range(8)]
    assert all(fork.legal_orders() == legal for fork in forks)
    for fork in forks[:2]:
        fork.step({"FRANCE": ["A PAR H"]})
    assert calls == ["SPRING 1901 MOVEMENT"]


def test_prepared_forks_compute_neither_legal_orders_nor_the_position_again(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board.start()
    apart = Board.start().snapshot(game_id="", seed=0, source="")
    board.prepare_forks()
    twin = board.fork()
    with monkeypatch.context() as patch:
        patch.setattr(Adjudicator, "get_all_possible_orders", None)
        patch.setattr("entente.game.board.freeze", None)
        assert twin.legal_orders() and twin.snapshot(game_id="", seed=0, source="") == apart
    twin.step({"FRANCE": ["A PAR - BUR"]})
    assert twin.snapshot(game_id="", seed=0, source="").position != apart.position


def test_a_board_knows_the_whole_orders_of_the_last_movement_phase_alone(trieste_falls: Board) -> None:
    """In the order of the units, with holds for units without an order; a retreat does not replace them."""
    ordered = trieste_falls.last_orders
    assert list(ordered) == list(POWERS)
    assert ordered["ITALY"] == ("F NAP H", "A TYR S A VEN - TRI", "A VEN - TRI")
    assert ordered["FRANCE"] == ("F BRE H", "A MAR H", "A PAR H")
    trieste_falls.step({"AUSTRIA": ["F TRI R ALB"]})
    assert trieste_falls.phase == "W1901A" and trieste_falls.last_orders == ordered
    trieste_falls.step({})
    assert trieste_falls.phase == "S1902M" and trieste_falls.last_orders == ordered
    trieste_falls.step({"ITALY": ["A TRI - BUD"]})
    assert trieste_falls.last_orders["ITALY"] == ("F NAP H", "A TRI - BUD", "A TYR H") and ordered["ITALY"][0] == "F NAP H"
    assert Board.start().last_orders == {}


def test_a_step_and_an_advance_have_the_same_last_orders(self_play) -> None:
    for board, _, orders in self_play(3, phases=20):
        stepped, advanced = board.fork(), board.fork()
        stepped.step(orders)
        advanced.advance(dict(reversed(orders.items())))
        assert list(stepped.last_orders.items()) == list(advanced.last_orders.items())


def test_forks_of_a_snapshot_have_its_last_orders(trieste_falls: Board) -> None:
    snapshot = freeze(trieste_falls)
    forks = [Board.restore(snapshot), Board.restore(snapshot).fork()]
    assert all(fork.last_orders == snapshot.last_orders == trieste_falls.last_orders for fork in forks)
    assert all(freeze(fork) == snapshot for fork in forks)
    for _ in range(3):
        forks[0].step({})
    assert forks[0].last_orders != forks[1].last_orders == snapshot.last_orders


def test_the_id_of_a_position_is_that_of_the_rules_whatever_was_ordered_before() -> None:
    board, twin = Board.start(), Board.start()
    board.step({"FRANCE": ["A PAR S F BRE"]})
    twin.step({})
    one, other = freeze(board), freeze(twin)
    assert one.snapshot_id == other.snapshot_id == position_id(board.rules_position()) and one != other
    assert '"last_orders"' not in freeze(Board.start()).position


@pytest.mark.parametrize("orders", [{"NARNIA": ["A PAR H"]}, {"FRANCE": ["A PAR H\nORDERS:"]}, {"FRANCE": [3]}, [1]])
def test_last_orders_that_nobody_can_have_given_are_refused(orders: object) -> None:
    with pytest.raises(DataError, match="has no position of this version"):
        Board.restore(altered(freeze(Board.start()), last_orders=orders))


def test_units_in_spring_are_those_after_adjustments_in_which_nothing_is_waived(self_play) -> None:
    kinds = set()
    for seed in range(6):
        for board, _, orders in self_play(seed):
            promised = {power: board.units_in_spring(power) for power in POWERS}
            if board.phase_type != "A":
                assert promised == {power: len(own) for power, own in board.units().items()}
                continue
            after = board.fork()
            after.step(orders)
            for power, own in after.units().items():
                waived = orders.get(power, []).count("WAIVE")
                assert len(own) == promised[power] - waived, (power, board.phase)
                kinds.add((waived > 0, len(own) < len(board.units()[power]), len(own) > len(board.units()[power])))
    assert {(False, True, False), (False, False, True)} <= kinds and any(waived for waived, *_ in kinds)


def test_a_game_ends_with_eighteen_centres() -> None:
    """France owns 17 centres and occupies the eighteenth in autumn."""
    board = Board.start()
    board.step({})
    snapshot = freeze(board)
    powers = json.loads(snapshot.position)["powers"]
    centres = [centre for power in powers for centre in power["centers"]]
    for power in powers:
        power["centers"] = centres[:17] if power["name"] == "FRANCE" else centres[17:] if power["name"] == "ITALY" else []
        power["units"] = [f"A {centres[17]}"] if power["name"] == "FRANCE" else []
    board = Board.restore(altered(snapshot, powers=powers))
    board.step({})
    assert board.is_over and board.phase == "COMPLETED"
    assert (board.year, board.season, board.phase_type, board.legal_orders()) == (1901, "", "", {})
    assert board.centre_counts()[POWERS.index("FRANCE")] == 18
    assert board.fork().year == 1901
    for act in (lambda: board.step({}), lambda: freeze(board)):
        with pytest.raises(InputError, match="over"):
            act()


def test_snapshot_columns_match_the_board(trieste_falls: Board) -> None:
    snapshot = freeze(trieste_falls)
    assert (snapshot.phase, snapshot.year, snapshot.season, snapshot.phase_type) == ("F1901R", 1901, "F", "R")
    assert (snapshot.game_id, snapshot.seed, snapshot.source) == ("game-1", 5, "scripted:hold")
    assert snapshot.centres == trieste_falls.centre_counts()
    assert len(snapshot.snapshot_id) == 16 and snapshot.snapshot_id == position_id(snapshot.position)
    on_the_map = dict.fromkeys(POWERS, 3) | {"RUSSIA": 4, "AUSTRIA": 2}
    assert units_of_powers(snapshot) == on_the_map, "a dislodged unit is not on the map"


def test_the_board_key_ignores_only_the_order_of_arrival() -> None:
    """Two move sequences to one board: ids differ, keys are equal. A unit elsewhere gives another key."""
    boards = [Board.start() for _ in range(3)]
    for board, orders in zip(boards, (["A PAR - PIC"], ["A PAR - PIC", "A MAR - GAS"], ["A MAR - SPA"]), strict=True):
        board.step({"FRANCE": orders})
    for board, orders in zip(boards, (["A PIC - BRE", "A MAR - GAS", "F BRE - MAO"],) * 3, strict=True):
        board.step({"FRANCE": orders})
    first, second, third = (freeze(board) for board in boards)
    assert boards[0].units() == boards[1].units() and first.snapshot_id != second.snapshot_id
    assert board_key(first) == board_key(second) != board_key(third)


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: replace(s, position=s.position.replace("A PAR", "A BUR")),
        lambda s: replace(s, position=s.position[:-5]),
        lambda s: altered(s, powers=[{"name": "FRANCE"}]),
        lambda s: altered(s, phase=None),
        lambda s: altered(s, map="standard_fleet_rome"),
    ],
    ids=["other text", "cut", "powers missing", "no phase", "another map"],
)
def test_a_damaged_snapshot_is_refused_by_name(damage) -> None:
    snapshot = damage(freeze(Board.start()))
    with pytest.raises(DataError, match=snapshot.snapshot_id):
        Board.restore(snapshot)
