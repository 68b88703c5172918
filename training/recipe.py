"""The name of a tiny model: a hash of all that shapes it. Apart from its making, so that whoever only looks for one need not
load torch.
"""

import hashlib
from pathlib import Path

from game.board import Board
from game.prompt_settings import DEFAULT_PROMPTS, PromptSettings
from game.prompts import board_text, power_text, rules_text
from training.settings import TinyModelSettings

RECIPE_VERSION = 2


def recipe_hash(settings: TinyModelSettings, prompts: PromptSettings = DEFAULT_PROMPTS) -> str:
    """Hash of everything that shapes the model: settings, and how a prompt is written and answered."""
    board = Board.start()
    legal = board.legal_orders()["FRANCE"]
    sample = rules_text(prompts) + board_text(board) + power_text(legal, board, prompts)
    return hashlib.sha256(f"{RECIPE_VERSION}|{settings.model_dump_json()}|{sample}".encode()).hexdigest()[:12]


def find_tiny(root: Path, recipe: TinyModelSettings, prompts: PromptSettings = DEFAULT_PROMPTS) -> Path | None:
    """The model of `recipe` for these prompts, if it was made under `root` by this version."""
    folder = root / f"tiny-{recipe_hash(recipe, prompts)}"
    return folder if (folder / "recipe.json").is_file() else None


def longest_sequence(prompts: PromptSettings) -> int:
    """Tokens that a tiny model may read and write in one decision; every order on a line of its own takes several times the
    room."""
    return 4096 if prompts.legal_orders == "lines" else 1024
