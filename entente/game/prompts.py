"""Prompt text in order of sharing: the rules, the board, then one power; and the settings of prompts.

The rules are the same for every prompt. What the board text shares depends on `PromptSettings.own_line`:

    in_place   the board names all powers in alphabetical order, so it is the same for all powers of a position
    last       the board names the other six from the farthest to the nearest, and the ordering power in the last segment, so
        forks of a start group share what their orders have not changed yet

The engine's prefix cache and the trainer's prefix packing depend on this order. Words are separated by single spaces and every
segment ends with a line break, so segments can be tokenised separately.
"""

import random
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from entente.game.legal import WAIVE, LegalOrders, OrderKind
from entente.game.snapshot import POWERS
from entente.telemetry.setting_marks import Settings

if TYPE_CHECKING:  # entente.game.board loads the engine
    from entente.game.board import Board

ChatSetting = Literal["auto", "none"]
OwnLine = Literal["in_place", "last"]


class PromptSettings(Settings, frozen=True):  # pyright: ignore[reportGeneralTypeIssues]; so that they know that it can be hashed
    """How prompts and answers are written; a model is trained for one way, so it is part of a tiny model's recipe."""

    own_line: OwnLine = "last"
    """Where the board names the units and centres of the power that orders: 'last', so that forks share the other lines;
    'in_place', so that powers share the board (the default where rollouts.policy_powers is 'all')."""
    chat: ChatSetting = "auto"
    """Whether the tokenizer's chat template is applied to a prompt: 'auto', if it has one; 'none'."""
    legal_orders: Literal["none", "lines"] = "none"
    """Legal orders in a prompt: 'none', or 'lines', every order on a line."""
    examples: Annotated[int, Field(ge=0, le=24)] = 0
    """Worked examples before the board, with the aim of the game and a key to its notation, for a model that was not trained on
    the game; all prompts share them; 0: none."""
    last_orders: bool = False
    """Whether a prompt has each power's orders of the last movement phase, on the line after the power's; in a game's first phase
    there are none. Prompts are about twice as long: raise inference.max_model_length where it is 512."""
    thinking_tokens: Annotated[int, Field(ge=0)] = 0
    """Maximum tokens of free text that the model may write before its orders; 0: none."""


DEFAULT_PROMPTS = PromptSettings()

FREE = "FREE"
"""First word of the line of supply centres without an owner."""
LAST = "LAST"
"""First word of the line of a power's orders of the last movement phase."""
BETWEEN_LAST_ORDERS = ", "
ANSWER_CUE = "ORDERS:\n"
"""The text before the orders. It ends with a line break, so every order of the answer follows a line break."""
THOUGHT_CUE = "THOUGHT:\n"
"""The text before a thought, for a model without tokens of its own for thinking."""
_BOARD_KEY = {
    "in_place": "Each power: units | supply centres. ",
    "last": "Each power: supply centres | units; yours last. ",
}
_LAST_KEY = f"{LAST}: a power's orders of the last movement phase. "
_HOW_TO_ANSWER = "Answer one order per line, in the order of the units named.\n"
_FARTHEST_FIRST: Mapping[str, tuple[str, ...]] = {
    "AUSTRIA": ("ENGLAND", "FRANCE", "TURKEY", "RUSSIA", "GERMANY", "ITALY"),
    "ENGLAND": ("TURKEY", "AUSTRIA", "ITALY", "RUSSIA", "GERMANY", "FRANCE"),
    "FRANCE": ("TURKEY", "RUSSIA", "AUSTRIA", "ITALY", "ENGLAND", "GERMANY"),
    "GERMANY": ("TURKEY", "ENGLAND", "ITALY", "RUSSIA", "FRANCE", "AUSTRIA"),
    "ITALY": ("ENGLAND", "RUSSIA", "TURKEY", "FRANCE", "GERMANY", "AUSTRIA"),
    "RUSSIA": ("ITALY", "FRANCE", "ENGLAND", "TURKEY", "AUSTRIA", "GERMANY"),
    "TURKEY": ("ENGLAND", "FRANCE", "GERMANY", "ITALY", "AUSTRIA", "RUSSIA"),
}
"""The other powers by mean steps between home centres: a power's orders first change its neighbours' lines, which come last."""
_TEACHER = "dumbbot"
"""Player of the worked examples: its orders are sensible, and include supports."""
_KINDS = (OrderKind.MOVEMENT, OrderKind.BUILD, OrderKind.MOVEMENT, OrderKind.RETREAT, OrderKind.MOVEMENT, OrderKind.DISBAND)
"""Kinds of the worked examples, in turn. Movements are what a prompt mostly asks for."""


_AIM = "You play Diplomacy without press. Whoever holds 18 supply centres wins: take more, and keep yours. "
_ORDER_KEY = (
    "A: army, F: fleet. A PAR - BUR moves, A PAR H holds, A MAR S A PAR - BUR supports that move, A MAR S F BRE supports "
    "a unit that stays, A LON - BEL VIA goes by convoy of F NTH C A LON - BEL. Retreats: A PAR R GAS, or A PAR D disbands. "
    "Builds: A PAR B, or WAIVE. "
)


def rules_text(settings: PromptSettings = DEFAULT_PROMPTS) -> str:
    think = f"Think first, in at most {settings.thinking_tokens} tokens. " if settings.thinking_tokens else ""
    board_key = _BOARD_KEY[settings.own_line]
    aim, order_key = (_AIM, _ORDER_KEY) if settings.examples else ("Diplomacy without press. ", "")
    last_key = _LAST_KEY if settings.last_orders else ""
    return aim + board_key + last_key + order_key + think + _HOW_TO_ANSWER


def board_text(board: "Board", power: str, settings: PromptSettings = DEFAULT_PROMPTS) -> str:
    """The second segment: the phase, one line per power, centres without an owner, dislodged units. With the own line in place it
    is the same for all powers; otherwise the last segment names the units and centres of `power`."""
    units, centres, dislodged = board.units(), board.centres(), board.dislodged()
    last = board.last_orders if settings.last_orders else {}
    lines, is_in_place = [board.long_phase], settings.own_line == "in_place"
    powers = POWERS if is_in_place else _FARTHEST_FIRST[power]
    for each in powers:
        parts = (units[each], centres[each]) if is_in_place else (centres[each], units[each])
        lines += [_line(each, *parts[0], "|", *parts[1]), *_last_line(each, last)]
    if free := board.free_centres():
        lines.append(_line(FREE, *free))
    lines += [_line("DISLODGED", each, *dislodged[each]) for each in powers if dislodged[each]]
    return "\n".join(lines) + "\n"


def power_text(legal: LegalOrders, board: "Board", settings: PromptSettings = DEFAULT_PROMPTS, cue: str = ANSWER_CUE) -> str:
    """The last segment: the power, the kind of orders, the number of builds or disbands, the sites in order, the last orders and
    the legal orders if the settings ask for them, and the cue (empty where something else follows the power).

    If the own line is last, the power's centres come before the kind of orders, and its units if they are not the sites. A
    retreat always names the locations open to each unit, because the board text does not show them.
    """
    count = [str(legal.picks)] if legal.kind in (OrderKind.BUILD, OrderKind.DISBAND) else []
    head = _line(*_own_line(legal, board, settings), legal.kind.upper(), *count)
    sites, lists_lines = list(legal.sites), settings.legal_orders == "lines"
    if legal.kind is OrderKind.RETREAT and not lists_lines:
        retreats = board.dislodged()[legal.power]
        sites = [_line(site, "R", *retreats[unit]) for site, unit in zip(sites, legal.sites, strict=True)]
    listed = _every_order(legal) if lists_lines else ()
    last = board.last_orders if settings.last_orders and settings.own_line == "last" else {}
    return "\n".join([_line(head, *sites), *_last_line(legal.power, last), *listed, cue])


def _own_line(legal: LegalOrders, board: "Board", settings: PromptSettings) -> list[str]:
    """The words before the kind of orders. What varies most between forks comes last."""
    if settings.own_line == "in_place":
        return [legal.power]
    is_for_other_sites = legal.kind in (OrderKind.RETREAT, OrderKind.BUILD)
    units = board.units()[legal.power] if is_for_other_sites else ()
    return [legal.power, *board.centres()[legal.power], "|", *units]


def _last_line(power: str, last_orders: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The line of the power's last orders, if there are any. What forks share of a power's lines is thus in one place."""
    own = last_orders.get(power)
    return [_line(LAST, power, BETWEEN_LAST_ORDERS.join(own))] if own else []


def _line(*words: str) -> str:
    return " ".join(words)


def _every_order(legal: LegalOrders) -> list[str]:
    lines = [order for options in legal.options for order in options]
    return [*lines, WAIVE] if legal.kind is OrderKind.BUILD else lines


@lru_cache(maxsize=8)
def worked_examples(settings: PromptSettings) -> tuple[tuple[str, str], ...]:
    """`settings.examples` pairs (question without board and cue, answer after its cue) of a scripted game, for instruct models.
    All prompts share them, so engine and trainer compute them once; boards would make them several times as long."""
    from entente.game.board import Board  # imported here because it loads the engine
    from entente.game.scripted import player

    wanted = [_KINDS[number % len(_KINDS)] for number in range(settings.examples)]
    examples: list[tuple[str, str]] = []
    rng, used = random.Random("worked examples"), list[str]()
    board = Board.start()
    while len(examples) < len(wanted):
        if board.is_over:
            board = Board.start()
        legal = board.legal_orders()
        orders = {power: player(_TEACHER)(own, rng, board) for power, own in legal.items()}
        kind = wanted[len(examples)]
        able = [power for power, own in legal.items() if own.kind is kind and not own.is_forced]
        if able:
            # The power that was used least, so that the examples do not favour one.
            power = min(able, key=lambda each: (used.count(each), POWERS.index(each)))
            used.append(power)
            asked = power_text(legal[power], board, settings, cue="").removesuffix("\n")
            answer = "\n".join(orders[power])
            examples.append((asked, ANSWER_CUE + answer))
        board.step(orders)
    return tuple(examples)
