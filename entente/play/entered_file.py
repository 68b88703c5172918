"""Writes the file of a game that was played on another server, `runs/_games/<name>.json`; see `storage/played_games.py`."""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from entente.game.board import POWERS
from entente.game.recorded import recorded_turns
from storage.files import durable_write, make_directory
from storage.played_games import SavedGame, SavedTurn, game_hash, read_game


def keep_game(
    saved: Any,
    game: str,
    power: str,
    *,
    address: str,
    player: str,
    controllers: Mapping[str, str],
    probabilities: Mapping[str, float],
    folder: Path,
    say: Callable[[str], None],
) -> SavedGame:
    """Write the file of a game that is over, and that `power` played for us, into the folder of played games.

    Args:
        saved: see `ServerClient.saved`.
        address: of the server.
        player: who ordered for us.
        controllers: account by power, of those that the server has named.
        probabilities: of the order sets that a version drew, by phase.
        say: takes a sentence for each recorded order that is not legal, and is left out.

    Raises:
        InputError: the server's record cannot be read.
    """
    turns = recorded_turns(saved, f"game '{game}'", say)
    others = {each: f"{controllers.get(each, 'unknown')}@{address}"[:256] for each in POWERS}
    drawn = {phase: {power: value} for phase, value in probabilities.items()}
    plain = re.sub(r"[^A-Za-z0-9]+", "-", f"{address}-{game}").strip("-")
    kept = SavedGame(
        # Different games have different names, whatever their ids hold.
        name=f"{plain[:40]}-{hashlib.sha256(f'{address}/{game}'.encode()).hexdigest()[:8]}",
        seats=others | {power: player},
        turns=tuple(
            SavedTurn(phase=turn.phase, orders=turn.orders, position=turn.position, probabilities=drawn.get(turn.phase, {}))
            for turn in turns
        ),
    )
    make_directory(folder)
    file = folder / f"{kept.name}.json"
    if not file.exists() or game_hash(read_game(file)) != game_hash(kept):  # else it is known, with its probabilities
        durable_write(file, kept.model_dump_json().encode() + b"\n")
    return kept
