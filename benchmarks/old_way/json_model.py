"""The tiny model that reads the old system's prompts: same shape, same teacher, same number of imitation steps.

A tokenizer spends many tokens on words that it never saw, and a base cannot play from prompts that it never read: so the old way
gets a twin that learned its own way of writing, as every other way of writing does in these benchmarks. Its prompts are three
times as long, so a step of imitation takes fewer decisions; the base scores of both are reported beside each other.
"""

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

from benchmarks.old_way.prompts import HEAD, json_prompt, prompt_text
from decoding.codec import Codec
from game.board import Board
from game.players import player
from telemetry.progress import reporter
from training import tiny_model as tiny
from training.recipe import recipe_hash
from training.settings import TinyModelSettings

ROWS_A_STEP = 16
"""Decisions of an imitation step; of the compact prompts' model they are about 35, whose tokens are as many."""


def make_json_model(root: Path, settings: TinyModelSettings) -> Path:
    """Folder of the twin under `root`, made now if it has not been made before: a minute or two of CPU."""
    board = Board.start()
    sample = prompt_text(board, board.legal_orders()["FRANCE"])
    name = hashlib.sha256(f"{recipe_hash(settings)}|{ROWS_A_STEP}|{sample}".encode()).hexdigest()[:12]
    final = root / f"tiny-json-{name}"
    if (final / "recipe.json").is_file():
        return final
    aside = root / f".{final.name}.{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        _make(aside, settings)
        if final.exists():
            shutil.rmtree(final)  # a folder without recipe.json: cut by an earlier kill
        os.rename(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _make(folder: Path, settings: TinyModelSettings) -> None:
    games = [position for number in range(settings.source_games) for position in _teacher_game(settings, number)]
    tiny._save_tokenizer(games, settings, folder)
    model = tiny._new_model(settings, tiny.DEFAULT_PROMPTS, folder)
    model.config.save_pretrained(folder)
    codec = Codec(folder)
    losses = tiny._imitate(
        model,
        games,
        settings.model_copy(update={"imitation_positions": max(1, min(ROWS_A_STEP, 3 * settings.imitation_positions))}),
        codec,
        lambda stage, done, total: reporter().stage(f"model of the old way: {stage}", done, total),
    )
    model.save_pretrained(folder)
    (folder / "recipe.json").write_text(json.dumps({"settings": settings.model_dump(), "loss": losses}, indent=1))


def _teacher_game(settings: TinyModelSettings, number: int) -> list["tiny._Position"]:
    """One decision a position, so that a row of imitation holds a single prompt: nothing but the head is shared."""
    teacher, dice, board = player(settings.teacher), random.Random(f"imitation-{settings.seed}-{number}"), Board.start()
    found = []
    while not board.is_over and board.year <= tiny._LAST_YEAR:
        legal = board.legal_orders()
        orders = {power: teacher(choice, dice, board) for power, choice in legal.items()}
        found += [
            tiny._Position(shared=(HEAD, ""), decisions=((json_prompt(board, choice), tuple(orders[power])),))
            for power, choice in legal.items()
            if not choice.is_forced
        ]
        board.step(orders)
    return found
