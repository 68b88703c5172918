"""The prompt of the old system, and the tiny model that reads it.

The prompt is a fixed head, then the position as indented JSON with the power first: phase, units, centres, neutral centres,
opponents' units, three leaders, and `<orders>`. It is raw text without a chat template and without legal orders. It had 1,304
characters on average there, or about 440 tokens. Because the power comes first, the powers of one position share only the head.
The old "windows" (four neighbours of each unit) are left out, and the head is shorter; indentation costs about as much.

The model has the shape of the one for compact prompts, and a tokenizer that is trained on these. Its weights are random: only
costs are compared, and under the mask it plays legal orders.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

from decoding.model_files import make_whole
from game.board import POWERS, Board
from game.legal import LegalOrders
from game.players import player
from game.prompt_settings import DEFAULT_PROMPTS
from training.recipe import longest_sequence
from training.settings import TINY_VOCABULARY, TinyModelSettings
from training.small_model import new_model, save_tokenizer

HEAD = (
    "You play one power of Diplomacy without press. Give one order for each of your units, one per line, in full, such as "
    "A PAR - BUR, A PAR H, A MAR S A PAR - BUR or F NTH C A LON - NWY. Retreats are R, disbands D, builds B, and WAIVE leaves a "
    "build out. End with </orders>.\n"
)
PRIMER = "\n<orders>\n"
_GAMES, _LAST_YEAR = 8, 1907
"""Games of `mover` whose prompts and orders train the tokenizer."""


def json_prompt(board: Board, legal: LegalOrders) -> str:
    """The prompt after the head, for the power of `legal`."""
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


def make_json_model(root: Path, settings: TinyModelSettings) -> Path:
    """Folder of the model under `root`; made if missing."""
    board = Board.start()
    sample = HEAD + json_prompt(board, board.legal_orders()["FRANCE"])
    name = hashlib.sha256(f"{settings.hidden} {settings.layers} {sample}".encode()).hexdigest()[:12]

    def make(folder: Path) -> None:
        save_tokenizer(_texts(), TINY_VOCABULARY, folder)
        longest = longest_sequence(DEFAULT_PROMPTS)
        new_model(folder, hidden=settings.hidden, layers=settings.layers, longest=longest, seed=0).save_pretrained(folder)

    return make_whole(root / f"tiny-json-{name}", "model.safetensors", make)


def _texts() -> Iterator[str]:
    mover = player("mover")
    for number in range(_GAMES):
        dice, board = random.Random(f"old way {number}"), Board.start()
        while not board.is_over and board.year <= _LAST_YEAR:
            orders = {power: mover(legal, dice, board) for power, legal in board.legal_orders().items()}
            for power, legal in board.legal_orders().items():
                yield HEAD + json_prompt(board, legal) + "\n".join(orders[power])
            board.step(orders)
