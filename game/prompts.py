"""Prompt text, from most shared to least shared: the rules, the board, then one power.

Owns the wording. The rules are the same for every prompt, the board is the same for all powers of a position,
and only the last piece names a power: the engine's prefix cache and the trainer's prefix packing both live on
that order. Words are parted by single spaces and each piece ends with a line break, so that pieces can be
turned into tokens apart. Knows nothing of tokens.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from game.legal import LegalOrders, OrderKind
from game.snapshot import POWERS

if TYPE_CHECKING:  # Only for its type: prompts of stored games are read without loading the engine.
    from game.board import Board

RULES = (
    "Diplomacy without press. Each power: units | supply centres. Answer one order per line, in the order of the units named.\n"
)


def rules_text() -> str:
    """What every prompt begins with."""
    return RULES


def board_text(board: "Board") -> str:
    """The position, the same for all powers: phase, a line per power, free centres, dislodged units."""
    units, centres, dislodged = board.units(), board.centres(), board.dislodged()
    lines = [board.long_phase]
    lines += [_line(power, *units[power], "|", *centres[power]) for power in POWERS]
    if free := board.free_centres():
        lines.append(_line("FREE", *free))
    lines += [_line("DISLODGED", power, *dislodged[power]) for power in POWERS if dislodged[power]]
    return "\n".join(lines) + "\n"


def power_text(legal: LegalOrders, board: "Board") -> str:
    """Who is to order what: power, kind of orders, number of builds or disbands, sites in order.

    A retreat also names the places open to each unit: the units and centres on the board do not tell them.
    """
    owed = [str(legal.picks)] if legal.kind in (OrderKind.BUILD, OrderKind.DISBAND) else []
    sites = list(legal.sites)
    if legal.kind is OrderKind.RETREAT:
        open_to = board.dislodged()[legal.power]
        sites = [_line(unit, "R", *open_to[unit]) for unit in legal.sites]
    return _line(legal.power, legal.kind.upper(), *owed, *sites) + "\nORDERS:\n"


def order_lines(orders: Iterable[str]) -> list[str]:
    """Orders as the lines of an answer: capitals, words parted by single spaces."""
    return [_line(*order.upper().split()) for order in orders]


def _line(*words: str) -> str:
    return " ".join(words)
