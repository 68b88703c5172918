"""The name of a tiny model: a hash of all that shapes it. Apart from its making, so that whoever only looks for one need not
load torch.
"""

import hashlib

from game.board import Board
from game.prompts import board_text, power_text, rules_text
from training.settings import TinyModelSettings

RECIPE_VERSION = 2


def recipe_hash(settings: TinyModelSettings) -> str:
    """Hash of everything that shapes the model: settings, and how a prompt is written."""
    board = Board.start()
    legal = board.legal_orders()["FRANCE"]
    sample = rules_text() + board_text(board) + power_text(legal, board)
    return hashlib.sha256(f"{RECIPE_VERSION}|{settings.model_dump_json()}|{sample}".encode()).hexdigest()[:12]
