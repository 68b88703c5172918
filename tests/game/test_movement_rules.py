"""The published rules on odd positions: the board and the second adjudicator agree on moves, dislodgements and retreats."""

from collections import Counter
from collections.abc import Callable

import pytest

from entente.game.board import Board
from entente.game.plain import plain_board
from entente.game.positions import board_of
from entente.game.snapshot import Snapshot
from tests.game.odd_positions import odd_position
from tests.game.second_adjudicator import assert_judged_alike, table_of


@pytest.mark.parametrize(
    "count",
    [200, pytest.param(3_000, marks=[pytest.mark.system, pytest.mark.in_turn]), pytest.param(20_000, marks=pytest.mark.slow)],
)
def test_odd_positions_come_out_as_the_second_adjudicator_says(count: int) -> None:
    seen = Counter[str]()
    for seed in range(count):
        units, orders = odd_position(seed)
        board, table = board_of("S1902M", units, {}, {}).fork(), table_of(units, orders)
        played = board.step(orders)
        assert not any(played.rejected.values())
        assert_judged_alike(table, board)
        assert table.cut_supports() <= {unit[2:5] for unit, marks in played.results.items() if "cut" in marks}, f"position {seed}"
        seen.update(mark for marks in played.results.values() for mark in marks)
        seen["circle"] += bool(table.circles)
        seen["paradox"] += bool(table.paradoxes)
        seen["retreat"] += any(board.dislodged().values())
    assert all(seen[what] for what in ("circle", "paradox", "retreat", "cut", "bounce", "void", "no convoy")), seen


@pytest.mark.parametrize("restore", [Board.restore, plain_board], ids=["fast", "plain"])
@pytest.mark.parametrize(
    ("coast", "units", "orders"),
    [
        pytest.param(
            "SPA/SC",
            {"FRANCE": ["A SPA", "F GAS"], "ITALY": ["F WES"], "ENGLAND": ["F MAO", "F NAF"]},
            {"FRANCE": ["A SPA - MAR"], "ENGLAND": ["F MAO - WES", "F NAF S F MAO - WES"]},
            id="Spain",
        ),
        pytest.param(
            "BUL/EC",
            {"FRANCE": ["A BUL"], "ITALY": ["F BLA"], "ENGLAND": ["F ANK", "F SEV"]},
            {"FRANCE": ["A BUL - SER"], "ENGLAND": ["F ANK - BLA", "F SEV S F ANK - BLA"]},
            id="Bulgaria",
        ),
    ],
)
def test_a_retreat_to_a_coast_gives_influence_over_the_province_until_another_power_enters(
    coast: str, units: dict[str, list[str]], orders: dict[str, list[str]], restore: Callable[[Snapshot], Board]
) -> None:
    position = board_of("S1902M", units, {}, {"ITALY": ["NAP"], "FRANCE": ["PAR"]})
    board = restore(position.snapshot(game_id="g", seed=0, source="test"))
    board.step(orders)
    board.step({"ITALY": [f"{units['ITALY'][0]} R {coast}"]})
    assert board.influence()["ITALY"] == (coast[:3],) and coast[:3] not in board.influence()["FRANCE"]
    (army,) = [unit for unit in board.units()["FRANCE"] if unit[0] == "A"]
    board.step({"FRANCE": [f"{army} - {coast[:3]}"], "ITALY": [f"F {coast} - {'LYO' if coast == 'SPA/SC' else 'CON'}"]})
    assert coast[:3] in board.influence()["FRANCE"] and coast[:3] not in board.influence()["ITALY"]
