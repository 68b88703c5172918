"""The name of a tiny model: a hash of everything that shapes it. This module does not import torch, so that a model can be looked
up without it.
"""

import hashlib
from pathlib import Path

from entente.game.board import Board
from entente.game.prompt_settings import DEFAULT_PROMPTS, PromptSettings
from entente.game.prompts import board_text, power_text, rules_text
from entente.training.settings import TinyModelSettings

RECIPE_VERSION = 3


def recipe_hash(settings: TinyModelSettings, prompts: PromptSettings = DEFAULT_PROMPTS) -> str:
    """Hash of the model's settings and of a sample prompt: 12 hex digits."""
    board = Board.start()
    legal = board.legal_orders()["FRANCE"]
    sample = rules_text(prompts) + board_text(board, legal.power, prompts) + power_text(legal, board, prompts)
    return hashlib.sha256(f"{RECIPE_VERSION}|{settings.model_dump_json()}|{sample}".encode()).hexdigest()[:12]


def find_tiny(root: Path, recipe: TinyModelSettings, prompts: PromptSettings = DEFAULT_PROMPTS) -> Path | None:
    """Folder of the model of `recipe` for these prompts under `root`; None if it was not made yet."""
    folder = root / f"tiny-{recipe_hash(recipe, prompts)}"
    return folder if (folder / "recipe.json").is_file() else None


def longest_sequence(prompts: PromptSettings) -> int:
    """Longest prompt plus completion of a tiny model, tokens. Prompts that list every legal order on a line are several times
    longer."""
    return (4096 if prompts.legal_orders == "lines" else 1024) + prompts.thinking_tokens
