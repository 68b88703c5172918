"""Worked examples: decisions of a scripted game with their answers, which show an instruct model what an answer looks like.

They stand before the board of every prompt and are the same in all, so an engine and the trainer compute them once. Each shows
the last segment of a prompt alone; boards would make them several times as long.
"""

import random
from functools import lru_cache

from entente.game.board import POWERS, Board
from entente.game.legal import OrderKind
from entente.game.players import player
from entente.game.prompt_settings import PromptSettings
from entente.game.prompts import ANSWER_CUE, power_text

_TEACHER = "dumbbot"
"""Its orders are sensible, and include supports."""
_KINDS = (OrderKind.MOVEMENT, OrderKind.BUILD, OrderKind.MOVEMENT, OrderKind.RETREAT, OrderKind.MOVEMENT, OrderKind.DISBAND)
"""Kinds of the examples, in turn. Movements are what a prompt mostly asks for."""


@lru_cache(maxsize=8)
def worked_examples(settings: PromptSettings) -> tuple[tuple[str, str], ...]:
    """`settings.examples` pairs: what is asked, without board and cue, and the answer after its cue."""
    wanted = [_KINDS[number % len(_KINDS)] for number in range(settings.examples)]
    found: list[tuple[str, str]] = []
    dice, shown = random.Random("worked examples"), list[str]()
    board = Board.start()
    while len(found) < len(wanted):
        if board.is_over:
            board = Board.start()
        legal = board.legal_orders()
        orders = {power: player(_TEACHER)(own, dice, board) for power, own in legal.items()}
        kind = wanted[len(found)]
        able = [power for power, own in legal.items() if own.kind is kind and not own.is_forced]
        if able:
            # The power that was shown least, so that the examples do not favour one.
            power = min(able, key=lambda each: (shown.count(each), POWERS.index(each)))
            shown.append(power)
            asked = power_text(legal[power], board, settings, cue="").removesuffix("\n")
            answer = "\n".join(orders[power])
            found.append((asked, ANSWER_CUE + answer))
        board.step(orders)
    return tuple(found)
