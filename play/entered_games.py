"""Games that were played on servers of others come home as files of played games.

A game's file is the one that `entente play` writes (`storage/played_games.py`). Seats of others bear the name of their
account there, 'alice@league.example:8432'.
"""

import hashlib
import re
from pathlib import Path

from game.board import POWERS
from game.recorded import recorded_orders
from play.entry import Entry, FinishedGame
from storage.files import durable_write, make_directory
from storage.played_games import SavedGame, SavedTurn, game_hash, read_game

UNKNOWN = "unknown"
"""Account of a power whose controller the server does not tell."""


def entered_name(game: str, address: str) -> str:
    """The name of a game on the server at `address`; different games have different names, whatever their ids hold."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", f"{address}-{game}").strip("-")
    return f"{plain[:40]}-{hashlib.sha256(f'{address}/{game}'.encode()).hexdigest()[:8]}"


def keep_entered(finished: FinishedGame, entry: Entry, folder: Path) -> SavedGame:
    """Write the file of a game that is over into the folder of played games.

    Raises:
        InputError: the game was not played by our rules.
    """
    turns = recorded_orders(finished.saved, f"game '{finished.game}'")
    others = {power: f"{finished.controllers.get(power, UNKNOWN)}@{entry.address}"[:256] for power in POWERS}
    drawn = {phase: {finished.power: value} for phase, value in finished.probabilities.items()}
    kept = SavedGame(
        name=entered_name(finished.game, entry.address),
        seats=others | {finished.power: entry.player},
        turns=tuple(SavedTurn(phase=phase, orders=own, probabilities=drawn.get(phase, {})) for phase, own in turns),
    )
    make_directory(folder)
    file = folder / f"{kept.name}.json"
    if not file.exists() or game_hash(read_game(file)) != game_hash(kept):  # else it is known, with its probabilities
        durable_write(file, kept.model_dump_json().encode() + b"\n")
    return kept
