"""What an answer orders, and what it is worth. The referee's tests (tests/benchmarks) hold shared luck and counts."""

import asyncio
import random

import pytest

from game.board import Board
from game.legal import LegalOrders, OrderKind
from game.players import player
from game.read_prompt import read_prompt
from game.scores import components, compute_standing, horizon_reached
from game.snapshot import Snapshot
from integrations.questions import questions_of, read_orders, score_orders
from rollouts.seeds import dice
from rollouts.settings import RolloutSettings
from telemetry.errors import InputError

MOVES = LegalOrders(
    power="FRANCE",
    kind=OrderKind.MOVEMENT,
    sites=("A PAR", "F BRE"),
    options=(("A PAR - BUR", "A PAR H"), ("F BRE - ENG", "F BRE H", "F BRE S A PAR - PIC")),
    picks=2,
)


@pytest.mark.parametrize(
    ("text", "orders", "ordered"),
    [
        ("A PAR - BUR\nF BRE S A PAR - PIC", ["A PAR - BUR", "F BRE S A PAR - PIC"], 2),
        ("A PAR - BUR\nF BRE - MAO", ["A PAR - BUR", "F BRE H"], 1),
        ("A PAR - BUR", ["A PAR - BUR", "F BRE H"], 1),
        ("F BRE - ENG\n  A PAR - BUR ", ["A PAR - BUR", "F BRE - ENG"], 2),
        ("F BRE - ENG\nF BRE H\nA MAR H", ["A PAR H", "F BRE - ENG"], 1),
        ("", ["A PAR H", "F BRE H"], 0),
    ],
    ids=["legal", "an illegal line", "a missing line", "in another order", "two for one unit", "nothing"],
)
def test_a_unit_takes_its_first_legal_line_and_holds_without_one(text: str, orders: list[str], ordered: int):
    assert read_orders(text, MOVES) == (orders, ordered)


def test_an_answer_is_worth_what_changes_until_the_horizon(positions: list[Snapshot]):
    question = questions_of(positions, seed=3)[0]
    rollouts = RolloutSettings(horizon_years=1, opponents="mover", last_winter=True)
    answer = player("mover")(question.legal, random.Random(1))
    found = asyncio.run(score_orders(question, answer, rollouts, shared="luck", name="0"))
    board, before = Board.restore(question.snapshot), compute_standing(Board.restore(question.snapshot))
    after = before
    while not horizon_reached(question.snapshot.phase, board.phase, 1):
        orders = {
            power: answer
            if power == question.power and after is before
            else player("random" if power == question.power else "mover")(legal, dice("luck", board.phase, power), board)
            for power, legal in board.legal_orders().items()
        }
        after = compute_standing(board, after, board.step(orders))
    assert found == components(before, after, question.power) and any(found.values())


def test_a_question_asks_a_power_that_has_a_choice_in_words_that_the_server_reads(positions: list[Snapshot]):
    questions = questions_of(positions, seed=3)
    assert len(questions) == len(positions) and len({question.power for question in questions}) > 1
    for question in questions:
        power, board = read_prompt(question.text)
        assert power == question.power and board.legal_orders()[power] == question.legal


def test_positions_without_a_movement_phase_are_refused_in_a_sentence():
    with pytest.raises(InputError, match="There are no positions"):
        questions_of([], seed=0)
