"""The old system's prompt: a static head, then the position as indented JSON with the asking power first.

Stands for its "static rules prefix", "SITUATION (power, phase, units)", its centres, neutrals, opponents' units, three leaders,
and the primer `<orders>`; raw text, no chat template, no list of legal orders by default. It was 1,304 characters on average, and
the figures of its single game give 440 tokens a call. Because the power comes first, the powers of a board share the head alone.
Its "windows" (four neighbours a unit) are left out, and the head is shorter than it was; indenting costs about as much.
"""

import json

from game.board import POWERS, Board
from game.legal import LegalOrders

HEAD = (
    "You play one power of Diplomacy without press. Give one order for each of your units, one per line, in full, such as "
    "A PAR - BUR, A PAR H, A MAR S A PAR - BUR or F NTH C A LON - NWY. Retreats are R, disbands D, builds B, and WAIVE leaves a "
    "build out. End with </orders>.\n"
)
PRIMER = "\n<orders>\n"


def json_prompt(board: Board, legal: LegalOrders) -> str:
    """Everything but the head, for the power that `legal` belongs to."""
    units, centres = board.units(), board.centres()
    position = {
        "power": legal.power,
        "phase": board.phase,
        "to_order": legal.kind.value,
        "orders_wanted": legal.picks,
        "your_units": list(legal.sites),
        "your_centers": list(centres[legal.power]),
        "neutral_centers": list(board.free_centres()),
        "opponents": {power: list(units[power]) for power in POWERS if power != legal.power and units[power]},
        "leaders": dict(sorted(((power, len(centres[power])) for power in POWERS), key=lambda own: -own[1])[:3]),
    }
    return json.dumps(position, indent=2) + PRIMER


def prompt_text(board: Board, legal: LegalOrders) -> str:
    """The whole prompt."""
    return HEAD + json_prompt(board, legal)
