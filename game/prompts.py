"""Prompt text, from most shared to least shared: the rules, the board, then one power.

Owns the wording. The rules are the same for every prompt, the board is the same for all powers of a position,
and only the last piece names a power, and after it what that power may do: the engine's prefix cache and the trainer's
prefix packing both live on that order. Words are parted by single spaces and each piece ends with a line break, so that
pieces can be turned into tokens apart. Knows nothing of tokens.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from game.legal import WAIVE, LegalOrders, OrderKind
from game.notation import answers
from game.prompt_settings import DEFAULT_PROMPTS, PromptSettings
from game.snapshot import POWERS

if TYPE_CHECKING:  # Only for its type: prompts of stored games are read without loading the engine.
    from game.board import Board

_INTRODUCTION = "Diplomacy without press. Each power: units | supply centres. "
_HOW_TO_ANSWER = {
    "full": "Answer one order per line, in the order of the units named.\n",
    "slot": "Answer what each unit does, one per line, in the order of the units named: BUR, BUR VIA, H, S PAR, S PAR BUR, "
    "C PAR BUR; builds and disbands by number.\n",
}
_HOW_TO_READ = {
    "none": "",
    "factored": "Each unit: where it may move, and whose move there it may support (H: stay); VIA: by convoy; C: convoys.\n",
    "lines": "",
}


def rules_text(settings: PromptSettings = DEFAULT_PROMPTS) -> str:
    """What every prompt begins with."""
    return _INTRODUCTION + _HOW_TO_ANSWER[settings.order_notation] + _HOW_TO_READ[settings.legal_orders]


def board_text(board: "Board") -> str:
    """The position, the same for all powers: phase, a line per power, free centres, dislodged units."""
    units, centres, dislodged = board.units(), board.centres(), board.dislodged()
    lines = [board.long_phase]
    lines += [_line(power, *units[power], "|", *centres[power]) for power in POWERS]
    if free := board.free_centres():
        lines.append(_line("FREE", *free))
    lines += [_line("DISLODGED", power, *dislodged[power]) for power in POWERS if dislodged[power]]
    return "\n".join(lines) + "\n"


def power_text(legal: LegalOrders, board: "Board", settings: PromptSettings = DEFAULT_PROMPTS) -> str:
    """Who is to order what: power, kind of orders, number of builds or disbands, sites in order, and what the settings
    tell of the legal orders.

    A retreat always names the places open to each unit: the units and centres on the board do not tell them.
    """
    owed = [str(legal.picks)] if legal.kind in (OrderKind.BUILD, OrderKind.DISBAND) else []
    head = _line(legal.power, legal.kind.upper(), *owed)
    sites, lists_lines = list(legal.sites), settings.legal_orders == "lines"
    if settings.order_notation == "slot" and (lists_lines or legal.kind in (OrderKind.BUILD, OrderKind.DISBAND)):
        # Numbers cost every prompt tokens of its own: only where an answer, or a line of the prompt, names one.
        sites = [_line(str(number), site) for number, site in enumerate(sites, start=1)]
    if legal.kind is OrderKind.RETREAT and not lists_lines:
        open_to = board.dislodged()[legal.power]
        sites = [_line(site, "R", *open_to[unit]) for site, unit in zip(sites, legal.sites, strict=True)]
    if settings.legal_orders == "factored" and legal.kind is OrderKind.MOVEMENT:
        lines = [head, *(_line(site, *_factored(own)) for site, own in zip(sites, legal.options, strict=True))]
    elif settings.legal_orders == "factored" and legal.kind is OrderKind.BUILD:
        # What differs between the orders of one centre: the unit, and a fleet's coast.
        kinds = [[order[0] + order.split(" ")[1][3:] for order in own] for own in legal.options]
        lines = [_line(head, *(_line(site, *own) for site, own in zip(sites, kinds, strict=True)))]
    else:
        lines = [_line(head, *sites), *(_every_order(legal, settings) if lists_lines else ())]
    return "\n".join([*lines, "ORDERS:\n"])


def order_lines(orders: Iterable[str]) -> list[str]:
    """Orders as the lines of an answer: capitals, words parted by single spaces."""
    return [_line(*order.upper().split()) for order in orders]


def _line(*words: str) -> str:
    return " ".join(words)


def _factored(options: Sequence[str]) -> list[str]:
    """One unit's options by place: "ARM SYR SEV, CON BUL H, SMY, S SPA MAR, VIA ALB APU, C LON BEL HOL".

    A place that it may move to, then the units whose move there it may support, and H where it may support whoever stays
    there. S: a place that it may only support into; VIA: where it may be convoyed; C: an army that it may convoy, and where
    to. Holding goes without saying, and so does what kind of unit stands in a place: the board tells.
    """
    moves, supports, convoyed, convoys = [], {}, [], {}
    for order in options:
        match order.split(" ")[2:]:
            case ["-", goal]:
                moves.append(goal)
            case ["-", goal, "VIA"]:
                convoyed.append(goal)
            case ["S", _, place, "-", goal]:
                supports.setdefault(goal, []).append(place)
            case ["S", _, place]:
                supports.setdefault(place, []).append("H")
            case ["C", _, place, "-", goal]:
                convoys.setdefault(place, []).append(goal)
    entries = [[goal, *supports.pop(goal, ())] for goal in moves]
    entries += [["S", goal, *helped] for goal, helped in supports.items()]
    entries += [["VIA", *convoyed]] if convoyed else []
    entries += [["C", place, *goals] for place, goals in convoys.items()]
    return [_line(*entry) + "," * (number < len(entries)) for number, entry in enumerate(entries, start=1)]


def _every_order(legal: LegalOrders, settings: PromptSettings) -> list[str]:
    """Each legal order on a line, as it is to be answered; in slot notation the unit's number stands before it."""
    lines = []
    for number, options in enumerate(answers(legal, settings.order_notation), start=1):
        unnumbered = settings.order_notation == "slot" and legal.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT)
        lines += [_line(str(number), line) if unnumbered else line for line in options]
    return [*lines, WAIVE] if legal.kind is OrderKind.BUILD else lines
