"""Orders are read from whatever a model writes, only legal ones leave, and what is missing is counted."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entente.game.board import Board
from entente.game.legal import WAIVE, LegalOrders, OrderKind
from entente.players.endpoint_players import messages
from entente.players.read_answer import AnswerCounts, no_answer, read_answer

LEGAL = Board.start().legal_orders()["FRANCE"]
WANTED = ["F BRE - MAO", "A MAR - SPA", "A PAR S A MAR - BUR"]
BUILD = LegalOrders(
    power="FRANCE", kind=OrderKind.BUILD, sites=("BRE", "PAR"), options=(("A BRE B", "F BRE B"), ("A PAR B",)), picks=2
)
DISBAND = LegalOrders(
    power="FRANCE",
    kind=OrderKind.DISBAND,
    sites=("A GAS", "A PAR", "F STP/SC"),
    options=(("A GAS D",), ("A PAR D",), ("F STP/SC D",)),
    picks=2,
)
STP = LegalOrders(
    power="RUSSIA", kind=OrderKind.MOVEMENT, sites=("F STP/SC",), options=(("F STP/SC - BOT", "F STP/SC H"),), picks=1
)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("Here are my orders:\n```\n" + "\n".join(WANTED) + "\n```\nGood luck!", id="a code fence"),
        pytest.param("1. F BRE - MAO\n2) A MAR - SPA\n(3) A PAR S A MAR - BUR", id="numbers"),
        pytest.param("f bre - mao.\na mar-spa\nArmy par supports army mar → bur", id="case, dashes, words"),
        pytest.param("F BRE -> MAO (to the ocean), A MAR - SPA; A PAR S A MAR - BUR, a bluff", id="one line with remarks"),
        pytest.param("A PAR: A PAR S A MAR - BUR\nA MAR: A MAR - SPA\nF BRE: F BRE - MAO", id="unit before the order"),
        pytest.param(json.dumps(dict(zip(LEGAL.sites, WANTED[1:] + WANTED[:1], strict=True))), id="JSON"),
        pytest.param(json.dumps({"orders": WANTED})[:-2], id="broken JSON"),
        pytest.param("<think>\nA PAR H\nA MAR H\n</think>\n" + "\n".join(WANTED), id="a thought before"),
        pytest.param("A PAR - PIC\nA MAR H\nNo, better:\n" + "\n".join(WANTED), id="a second thought"),
    ],
)
def test_formatting_does_not_matter(text: str):
    orders, counts = read_answer(text, LEGAL)
    assert sorted(orders) == sorted(WANTED) and LEGAL.admits(orders)
    assert counts == AnswerCounts(answers=1, orders=3)


@pytest.mark.parametrize(
    ("text", "orders", "missing", "illegal", "unparsable"),
    [
        pytest.param("A PAR - BUR", ["F BRE H", "A MAR H", "A PAR - BUR"], 2, 0, 0, id="too few"),
        pytest.param("A PAR - MUN\nA MAR - SPA\nF BRE H", ["F BRE H", "A MAR - SPA", "A PAR H"], 1, 1, 0, id="an illegal one"),
        pytest.param("A PAR - BURGUNDY", ["F BRE H", "A MAR H", "A PAR H"], 3, 0, 1, id="a longer name is not cut"),
        pytest.param("", ["F BRE H", "A MAR H", "A PAR H"], 3, 0, 1, id="nothing"),
    ],
)
def test_what_is_missing_or_illegal_holds_and_is_counted(text, orders, missing, illegal, unparsable):
    found, counts = read_answer(text, LEGAL)
    assert sorted(found) == sorted(orders)
    assert counts == AnswerCounts(answers=1, orders=3, missing=missing, illegal=illegal, unparsable=unparsable)


@pytest.mark.parametrize(
    ("legal", "text", "orders", "missing", "illegal"),
    [
        pytest.param(BUILD, "F BRE B\nWAIVE", ["F BRE B", WAIVE], 0, 0, id="a build waived"),
        pytest.param(BUILD, "1. A PAR B", ["A PAR B", WAIVE], 1, 0, id="a build missing"),
        pytest.param(DISBAND, "F STP/SC D", ["A GAS D", "F STP/SC D"], 1, 0, id="the first unit goes"),
        pytest.param(DISBAND, "A GAS D\nA PAR D\nF STP(SC) D", ["A GAS D", "A PAR D"], 0, 1, id="one too many"),
        pytest.param(STP, "f stp (sc) - bot", ["F STP/SC - BOT"], 0, 0, id="a coast in brackets"),
    ],
)
def test_builds_disbands_and_coasts(legal, text, orders, missing, illegal):
    found, counts = read_answer(text, legal)
    assert found == orders and (counts.missing, counts.illegal) == (missing, illegal)


@pytest.mark.parametrize("legal", [LEGAL, BUILD, DISBAND, STP], ids=["movement", "build", "disband", "coast"])
def test_any_text_gives_a_legal_set(legal: LegalOrders):
    pieces = [order for options in legal.options for order in options] + [
        "WAIVE",
        "\n",
        ",",
        '{"',
        "[",
        "- ",
        "A PAR",
        "/",
        "```",
    ]

    @given(st.lists(st.sampled_from(pieces) | st.text(max_size=6), max_size=20).map(" ".join) | st.text())
    def check(text: str) -> None:
        orders, counts = read_answer(text, legal)
        assert legal.admits(orders) and 0 <= counts.missing <= counts.orders == legal.picks

    check()
    assert legal.admits(no_answer(legal)[0])


@pytest.mark.parametrize("text", [" " * 200_000, "-" * 200_000, "A " * 100_000, "[" * 100_000, '"' * 200_000], ids=repr)
def test_long_nonsense_takes_no_time(text: str):
    """A pattern that backtracks would take minutes here."""
    assert read_answer(text, LEGAL)[1].unparsable == 1


def test_the_question_names_power_position_and_every_legal_order():
    board = Board.start()
    for power, legal in board.legal_orders().items():
        asked = messages(board, legal)[1]["content"]
        listed = asked.split("\n")
        assert f"{power} MOVEMENT {' '.join(legal.sites)}" in asked and "SPRING 1901" in asked
        assert all(order in listed for options in legal.options for order in options)
