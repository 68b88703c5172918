"""The question to an endpoint: rules, position, power and all its legal orders, and a JSON schema of the answer.

Positions and orders are written as in our own prompts.
"""

from typing import Any

from game.board import Board
from game.legal import WAIVE, LegalOrders, OrderKind
from game.prompt_settings import PromptSettings
from game.prompts import board_text, power_text

_PROMPTS = PromptSettings(own_line="in_place", legal_orders="lines")
MOST_CHOICES = 1000
"""Most orders in a schema. Endpoints limit the number of values of a schema; the list in the prompt has no limit."""
_RULES = """\
You play one power in a game of Diplomacy without press, by the standard rules. 18 supply centres win: own as many as you can.

The position names each power with its units | its supply centres, and FREE supply centres. A is an army, F a fleet.
A PAR - BUR          moves
A PAR - LON VIA      moves by convoy
A PAR H              holds
A MAR S A PAR - BUR  supports a move
A MAR S A PAR        supports a unit that does not move
F ENG C A PAR - LON  convoys
A PAR R GAS          retreats
A PAR D              disbands
A PAR B              builds
WAIVE                declines a build

Below the position are your power, the kind of orders with the number of builds or disbands, your units or sites, and all your \
legal orders. Choose one legal order for each unit; for builds and disbands choose as many as the number says. Answer with these \
orders alone, one per line, each copied from the list."""


def messages(board: Board, legal: LegalOrders) -> list[dict[str, str]]:
    """The messages of the chat: the rules, then position, power and legal orders."""
    asked = board_text(board, legal.power, _PROMPTS) + power_text(legal, board, _PROMPTS)
    return [{"role": "system", "content": _RULES}, {"role": "user", "content": asked}]


def answer_schema(legal: LegalOrders) -> dict[str, Any] | None:
    """A JSON schema of the answer: an order for each unit, or a list of builds or disbands; None if there are too many orders."""
    if sum(len(options) for options in legal.options) > MOST_CHOICES:
        return None
    if legal.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT):
        parts: dict[str, Any] = {
            site: {"type": "string", "enum": list(options)} for site, options in zip(legal.sites, legal.options, strict=True)
        }
    else:
        choices = [order for options in legal.options for order in options]
        choices += [WAIVE] if legal.kind is OrderKind.BUILD else []
        parts = {f"order {number}": {"type": "string", "enum": choices} for number in range(1, legal.picks + 1)}
    return {"type": "object", "properties": parts, "required": list(parts), "additionalProperties": False}
