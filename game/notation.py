"""How orders are spelled in an answer: in full, or by slot.

Owns both directions' only rule: `answers` gives, for each legal order, the line that stands for it. In slot notation the
line leaves out what its place and the board tell: "BUR" on the line of the army in Paris that moves there, "S PAR BUR" on that
of one which supports it. Where a power chooses among sites, the prompt has numbered them from 1, and the line is "2" for the
second unit disbanded, "1 A" and "3 F/SC" for what is built where. A site's lines differ from one another, and where sites are
chosen, so do all lines.
"""

from collections.abc import Sequence

from game.legal import WAIVE, LegalOrders, OrderKind
from game.prompt_settings import OrderNotation
from telemetry.errors import InputError


def answers(legal: LegalOrders, notation: OrderNotation = "full") -> tuple[tuple[str, ...], ...]:
    """Per site, the answer line of each of its options, in their order; WAIVE spells itself."""
    if notation == "full":
        return legal.options
    return tuple(
        tuple(_in_slot(order, site, legal.kind) for order in options) for site, options in enumerate(legal.options, start=1)
    )


def answer_lines(orders: Sequence[str], legal: LegalOrders, notation: OrderNotation = "full") -> list[str]:
    """The answer that gives this set of orders: one line each.

    Raises:
        InputError: an order is none of the legal ones.
    """
    line_of = {WAIVE: WAIVE} if legal.kind is OrderKind.BUILD else {}
    for options, lines in zip(legal.options, answers(legal, notation), strict=True):
        line_of |= zip(options, lines, strict=True)
    strange = [order for order in orders if order not in line_of]
    if strange:
        raise InputError(f"{legal.power} cannot order {strange[0]!r} in this {legal.kind} phase: it is not legal here")
    return [line_of[order] for order in orders]


def _in_slot(order: str, number: int, kind: OrderKind) -> str:
    unit, location, *action = order.split(" ")
    if kind is OrderKind.DISBAND:
        return str(number)
    if kind is OrderKind.BUILD:
        return f"{number} {unit}{location[3:]}"  # the place is the slot's; a fleet's coast is not
    # The board tells what kind of unit stands in a place, and a place alone is where to.
    return " ".join(word for word in action if word not in ("-", "A", "F", "R"))
