"""The prompt of the old system, and the tiny model that learned to read it.

The prompt is a fixed head, then the position as indented JSON with the power first: phase, units, centres, neutral centres,
opponents' units, three leaders, and `<orders>`. It is raw text without a chat template and without legal orders. It had 1,304
characters on average there, or about 440 tokens. Because the power comes first, the powers of one position share only the head.
The old "windows" (four neighbours of each unit) are left out, and the head is shorter; indentation costs about as much.

The model has the shape, teacher and imitation steps of the one for compact prompts. A base model cannot play from prompts that it
never saw, so each form of prompt has a tiny model. These prompts are three times as long, so a step of imitation has fewer
decisions. The scores of both base models are reported.
"""

import hashlib
import json
import random
from pathlib import Path

from decoding.codec import Codec
from decoding.model_files import RECIPE, make_whole
from game.board import POWERS, Board
from game.legal import LegalOrders
from game.players import player
from game.prompt_settings import DEFAULT_PROMPTS
from telemetry.progress import reporter
from training import tiny_model as tiny
from training.recipe import longest_sequence, recipe_hash
from training.settings import TINY_TEACHER, TINY_VOCABULARY, TinyModelSettings
from training.small_model import new_model, save_tokenizer

HEAD = (
    "You play one power of Diplomacy without press. Give one order for each of your units, one per line, in full, such as "
    "A PAR - BUR, A PAR H, A MAR S A PAR - BUR or F NTH C A LON - NWY. Retreats are R, disbands D, builds B, and WAIVE leaves a "
    "build out. End with </orders>.\n"
)
PRIMER = "\n<orders>\n"
ROWS_A_STEP = 16
"""Decisions of an imitation step, with about as many tokens as the 35 decisions of a step with compact prompts."""


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
    """Folder of the model under `root`. A missing model is made, which takes a minute or two."""
    board = Board.start()
    sample = HEAD + json_prompt(board, board.legal_orders()["FRANCE"])
    name = hashlib.sha256(f"{recipe_hash(settings)}|{ROWS_A_STEP}|{sample}".encode()).hexdigest()[:12]
    return make_whole(root / f"tiny-json-{name}", RECIPE, lambda folder: _make(folder, settings))


def _make(folder: Path, settings: TinyModelSettings) -> None:
    games = [position for number in range(settings.source_games) for position in _teacher_game(settings, number)]
    save_tokenizer(tiny._texts(games, after_thought=""), TINY_VOCABULARY, folder)
    longest = longest_sequence(DEFAULT_PROMPTS)
    model = new_model(folder, hidden=settings.hidden, layers=settings.layers, longest=longest, seed=0)
    model.config.save_pretrained(folder)
    codec = Codec(folder)
    losses = tiny._imitate(
        model,
        games,
        settings.model_copy(update={"imitation_positions": max(1, min(ROWS_A_STEP, 3 * settings.imitation_positions))}),
        codec,
        None,
        lambda stage, done, total: reporter().stage(f"model of the old way: {stage}", done, total),
    )
    model.save_pretrained(folder)
    (folder / "recipe.json").write_text(json.dumps({"settings": settings.model_dump(), "loss": losses}, indent=1))


def _teacher_game(settings: TinyModelSettings, number: int) -> list["tiny._Position"]:
    """A game of the teacher with one decision for each entry, so that rows of imitation share only the head."""
    teacher, dice, board = player(TINY_TEACHER), random.Random(f"imitation-{number}"), Board.start()
    found = []
    while not board.is_over and board.year <= tiny._LAST_YEAR:
        legal = board.legal_orders()
        orders = {power: teacher(choice, dice, board) for power, choice in legal.items()}
        found += [
            tiny._Position(shared=(HEAD, ""), decisions=((json_prompt(board, choice), (), tuple(orders[power])),))
            for power, choice in legal.items()
            if not choice.is_forced
        ]
        board.step(orders)
    return found
