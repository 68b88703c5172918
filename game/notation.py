"""Order notations: how an answer spells each legal order.

In full notation an answer line is the order text itself. Slot notation omits what the position of the line and the board
already say. "BUR" on the line of the army in Paris means "A PAR - BUR"; "S PAR BUR" on the line of another unit supports that
move. In builds and disbands the power chooses among sites, so lines begin with the number that the prompt gives the site, from
1: "2" disbands the second unit, "1 A" and "3 F/SC" build at the first and third site.

Lines of one site are distinct. In builds and disbands all lines are distinct.
"""

from collections.abc import Sequence

from game.legal import WAIVE, LegalOrders, OrderKind
from game.prompt_settings import OrderNotation
from telemetry.errors import InputError


def option_lines(legal: LegalOrders, notation: OrderNotation = "full") -> tuple[tuple[str, ...], ...]:
    """The answer line of each legal order, per site, in the order of `legal.options`. WAIVE is not among them."""
    if notation == "full":
        return legal.options
    return tuple(
        tuple(_slot_line(order, number, legal.kind) for order in options) for number, options in enumerate(legal.options, start=1)
    )


def answer_lines(orders: Sequence[str], legal: LegalOrders, notation: OrderNotation = "full") -> list[str]:
    """The answer lines that spell `orders`, one line per order.

    Raises:
        InputError: an order is not legal.
    """
    line_of = {WAIVE: WAIVE} if legal.kind is OrderKind.BUILD else {}
    for options, lines in zip(legal.options, option_lines(legal, notation), strict=True):
        line_of |= zip(options, lines, strict=True)
    illegal = [order for order in orders if order not in line_of]
    if illegal:
        raise InputError(f"{legal.power} cannot order {illegal[0]!r}: it is not legal in this {legal.kind} phase")
    return [line_of[order] for order in orders]


def _slot_line(order: str, number: int, kind: OrderKind) -> str:
    unit, location, *action = order.split(" ")
    if kind is OrderKind.DISBAND:
        return str(number)
    if kind is OrderKind.BUILD:
        return f"{number} {unit}{location[3:]}"  # the number names the province; a fleet's coast must be named
    # The board shows the type of each unit, and a bare location is the destination.
    return " ".join(word for word in action if word not in ("-", "A", "F", "R"))
