"""The question to an endpoint: rules, position, power and all its legal orders.

Positions and orders are written as in our own prompts.
"""

from entente.game.board import Board
from entente.game.legal import LegalOrders
from entente.game.prompt_settings import PromptSettings
from entente.game.prompts import board_text, power_text

_PROMPTS = PromptSettings(own_line="in_place", legal_orders="lines")
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
