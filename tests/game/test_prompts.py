"""Prompt text: golden, complete, the same for all powers, and shaped for sharing."""

import re

from game.board import POWERS, Board
from game.prompts import board_text, order_lines, power_text, rules_text

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


def test_the_board_reads_as_it_should(trieste_falls: Board) -> None:
    assert board_text(trieste_falls) == TRIESTE_FALLS


def test_a_power_is_told_what_to_order_in_which_order(trieste_falls: Board) -> None:
    (retreat,) = trieste_falls.legal_orders().values()
    assert power_text(retreat, trieste_falls) == "AUSTRIA RETREAT F TRI R ADR ALB\nORDERS:\n"
    board = Board.start()
    assert power_text(board.legal_orders()["FRANCE"], board) == "FRANCE MOVEMENT F BRE A MAR A PAR\nORDERS:\n"
    board.step({"FRANCE": ["A MAR - SPA", "F BRE - MAO"]})
    board.step({"FRANCE": ["F MAO - POR"]})
    assert power_text(board.legal_orders()["FRANCE"], board) == "FRANCE BUILD 2 BRE MAR\nORDERS:\n"


def test_an_owed_disband_names_its_number(self_play) -> None:
    seen = 0
    for board, legal, _ in self_play(4, phases=30):
        for own in legal.values():
            if own.kind == "disband":
                seen += 1
                assert power_text(own, board) == f"{own.power} DISBAND {own.picks} {' '.join(own.sites)}\nORDERS:\n"
    assert seen


def read_back(text: str) -> tuple[str, dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    phase, *lines = text.splitlines()
    units, centres = {}, {}
    for line in lines[:7]:
        power, rest = line.split(" ", 1)
        on_map, owned = re.fullmatch(r"(.*?) ?\|(.*)", rest).groups()
        units[power] = tuple(re.findall(r"[AF] [A-Z]{3}(?:/[A-Z]{2})?", on_map))
        centres[power] = tuple(owned.split())
    return phase, units, centres


def test_the_board_text_holds_the_whole_position_and_nothing_of_how_it_came_about(self_play) -> None:
    for seed in range(2):
        for board, _, _ in self_play(seed, phases=30):
            text = board_text(board)
            phase, units, centres = read_back(text)
            assert tuple(units) == POWERS
            assert (phase, units, centres) == (board.long_phase, board.units(), board.centres())
            owned = {centre for own in centres.values() for centre in own}
            (free,) = [line.split()[1:] for line in text.splitlines() if line.startswith("FREE ")] or [[]]
            assert len(owned) + len(free) == 34 and not owned & set(free)
            dislodged = [line.split(" ", 2)[1:] for line in text.splitlines() if line.startswith("DISLODGED ")]
            assert dislodged == [[power, " ".join(own)] for power, own in board.dislodged().items() if own]


def test_the_pieces_are_compact_and_join_cleanly(self_play) -> None:
    """Single spaces, no space at a line's end, one line break at the end; about 350 characters of board."""
    lengths = []
    for board, legal, _ in self_play(0, phases=30):
        pieces = [rules_text(), board_text(board), *(power_text(own, board) for own in legal.values())]
        assert all(piece.endswith("\n") and not piece.endswith("\n\n") for piece in pieces)
        assert not any("  " in piece or " \n" in piece or "\n " in piece for piece in pieces)
        lengths.append(len(pieces[1]))
    assert 300 < sum(lengths) / len(lengths) < 420
    assert rules_text().count("\n") <= 2 and len(rules_text()) < 300


def test_order_lines_are_canonical() -> None:
    assert order_lines(["a par  - bur", " F BRE H ", "WAIVE"]) == ["A PAR - BUR", "F BRE H", "WAIVE"]
    orders = Board.start().legal_orders()["FRANCE"].options[0]
    assert order_lines(orders) == list(orders)
