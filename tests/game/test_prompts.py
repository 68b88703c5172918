"""Prompt text: fixed examples, completeness, and segments that prompts share."""

import pytest

from entente.game.board import POWERS, Board
from entente.game.legal import WAIVE, OrderKind
from entente.game.prompts import PromptSettings, board_text, power_text, rules_text

IN_PLACE = PromptSettings(own_line="in_place")
TRIESTE_FALLS = """\
FALL 1901 RETREATS
AUSTRIA A BUD A VIE | BUD TRI VIE
ENGLAND F EDI F LON A LVP | EDI LON LVP
FRANCE F BRE A MAR A PAR | BRE MAR PAR
GERMANY A BER F KIE A MUN | BER KIE MUN
ITALY F NAP A TRI A TYR | NAP ROM VEN
RUSSIA A MOS F SEV F STP/SC A WAR | MOS SEV STP WAR
TURKEY F ANK A CON A SMY | ANK CON SMY
FREE BEL BUL DEN GRE HOL NWY POR RUM SER SPA SWE TUN
DISLODGED AUSTRIA F TRI
"""
TRIESTE_FALLS_FOR_GERMANY = """\
FALL 1901 RETREATS
TURKEY ANK CON SMY | F ANK A CON A SMY
ENGLAND EDI LON LVP | F EDI F LON A LVP
ITALY NAP ROM VEN | F NAP A TRI A TYR
RUSSIA MOS SEV STP WAR | A MOS F SEV F STP/SC A WAR
FRANCE BRE MAR PAR | F BRE A MAR A PAR
AUSTRIA BUD TRI VIE | A BUD A VIE
FREE BEL BUL DEN GRE HOL NWY POR RUM SER SPA SWE TUN
DISLODGED AUSTRIA F TRI
"""


def test_the_board_reads_as_it_should(trieste_falls: Board) -> None:
    for power in POWERS:
        assert board_text(trieste_falls, power, IN_PLACE) == TRIESTE_FALLS
    assert board_text(trieste_falls, "GERMANY") == TRIESTE_FALLS_FOR_GERMANY


def test_the_power_text_names_the_sites_in_order(trieste_falls: Board) -> None:
    (retreat,) = trieste_falls.legal_orders().values()
    assert power_text(retreat, trieste_falls, IN_PLACE) == "AUSTRIA RETREAT F TRI R ADR ALB\nORDERS:\n"
    board = Board.start()
    assert power_text(board.legal_orders()["FRANCE"], board, IN_PLACE) == "FRANCE MOVEMENT F BRE A MAR A PAR\nORDERS:\n"
    board.step({"FRANCE": ["A MAR - SPA", "F BRE - MAO"]})
    board.step({"FRANCE": ["F MAO - POR"]})
    assert power_text(board.legal_orders()["FRANCE"], board, IN_PLACE) == "FRANCE BUILD 2 BRE MAR\nORDERS:\n"


LINES = PromptSettings(own_line="in_place", legal_orders="lines")
WAYS = [
    PromptSettings.model_validate({"own_line": place, "legal_orders": listed, "last_orders": last})
    for place in ("in_place", "last")
    for listed in ("none", "lines")
    for last in (False, True)
]


def test_prompts_of_lines_name_every_legal_order_as_it_is_to_be_answered(self_play) -> None:
    for board, legal, _ in self_play(2, phases=25):
        for own in legal.values():
            last = [WAIVE] if own.kind is OrderKind.BUILD else []
            flat = [order for options in own.options for order in options]
            assert power_text(own, board, LINES).splitlines()[1:-1] == flat + last


@pytest.mark.parametrize("settings", WAYS, ids=lambda way: f"{way.own_line}-{way.legal_orders}-{way.last_orders}")
def test_every_way_shares_the_same_pieces_first_and_joins_cleanly(self_play, settings: PromptSettings) -> None:
    """Rules are equal for all prompts, and all text about the power is in the last segment."""
    rules = set()
    for board, legal, _ in self_play(1, phases=12):
        rules.add(rules_text(settings))
        for power, own in legal.items():
            piece = power_text(own, board, settings)
            assert (
                piece.startswith(f"{power} ")
                and f" {own.kind.upper()}" in piece.splitlines()[0]
                and piece.endswith("\nORDERS:\n")
            )
            assert not any(bad in piece for bad in ("  ", " \n", "\n ", "\n\n"))
    assert len(rules) == 1


def test_the_own_line_is_last_with_what_varies_most_at_its_end(trieste_falls: Board) -> None:
    (retreat,) = trieste_falls.legal_orders().values()
    assert power_text(retreat, trieste_falls) == "AUSTRIA BUD TRI VIE | A BUD A VIE RETREAT F TRI R ADR ALB\nORDERS:\n"
    board = Board.start()
    assert power_text(board.legal_orders()["FRANCE"], board) == "FRANCE BRE MAR PAR | MOVEMENT F BRE A MAR A PAR\nORDERS:\n"
    board.step({"FRANCE": ["A MAR - SPA", "F BRE - MAO"]})
    board.step({"FRANCE": ["F MAO - POR"]})
    build = "FRANCE BRE MAR PAR POR SPA | A PAR F POR A SPA BUILD 2 BRE MAR\nORDERS:\n"
    assert power_text(board.legal_orders()["FRANCE"], board) == build


@pytest.mark.parametrize("place", ["in_place", "last"])
def test_the_last_orders_of_a_power_follow_its_line_and_change_nothing_else(trieste_falls: Board, place: str) -> None:
    plain, shown = (PromptSettings.model_validate({"own_line": place, "last_orders": last}) for last in (False, True))
    (retreat,) = trieste_falls.legal_orders().values()
    texts = [board_text(trieste_falls, "AUSTRIA", each) + power_text(retreat, trieste_falls, each) for each in (plain, shown)]
    lines = texts[1].splitlines()
    assert [line for line in lines if not line.startswith("LAST ")] == texts[0].splitlines()
    assert sum(line.startswith("LAST ") for line in lines) == 7
    place_of = {line.split()[0]: number for number, line in reversed(list(enumerate(lines)))}
    assert lines[place_of["ITALY"] + 1] == "LAST ITALY F NAP H, A TYR S A VEN - TRI, A VEN - TRI"
    assert lines[place_of["AUSTRIA"] + 1] == "LAST AUSTRIA A BUD H, F TRI H, A VIE H"
    begin = Board.start()
    assert board_text(begin, "FRANCE", shown) == board_text(begin, "FRANCE", plain), "nobody has ordered yet"
    assert rules_text(shown).replace("LAST: a power's orders of the last movement phase. ", "") == rules_text(plain)


def test_forks_whose_own_orders_changed_nothing_else_share_the_board() -> None:
    board, twin = Board.start(), Board.start()
    board.step({"FRANCE": ["A PAR - BUR"]})
    twin.step({"FRANCE": ["A PAR - PIC"]})
    assert board_text(board, "FRANCE") == board_text(twin, "FRANCE")
    assert board_text(board, "FRANCE", IN_PLACE) != board_text(twin, "FRANCE", IN_PLACE)
