"""Writes the file of a game from another server, `runs/_games/<name>.json`; see `storage/played_games.py`."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from entente.game.board import POWERS
from entente.game.recorded import recorded_turns
from storage.files import durable_write, make_directory
from storage.played_games import SavedGame, SavedTurn


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
    """Write the file of a finished game in which we played `power` into the folder of played games.

    Args:
        saved: see `ServerClient.saved`.
        controllers: account by power, as far as the server reports them.
        probabilities: of a version's order sets, by phase.
        say: logs a message for each recorded order that is not legal; these are left out.

    Raises:
        InputError: the server's record cannot be read.
    """
    turns = recorded_turns(saved, f"game '{game}'", say)
    others = {each: f"{controllers.get(each, 'unknown')}@{address}"[:256] for each in POWERS}
    drawn = {phase: {power: value} for phase, value in probabilities.items()}
    plain = re.sub(r"[^A-Za-z0-9]+", "-", f"{address}-{game}").strip("-")
    # Different games have different names, also of one id on a server that began anew, and of two commands with a seat each.
    which = json.dumps([address, game, power, [(turn.phase, turn.orders) for turn in turns]], sort_keys=True)
    kept = SavedGame(
        name=f"{plain[:40]}-{hashlib.sha256(which.encode()).hexdigest()[:8]}",
        seats=others | {power: player},
        turns=tuple(
            SavedTurn(phase=turn.phase, orders=turn.orders, position=turn.position, probabilities=drawn.get(turn.phase, {}))
            for turn in turns
        ),
    )
    make_directory(folder)
    file = folder / f"{kept.name}.json"
    if not file.exists():  # else it was stored before, with its probabilities
        durable_write(file, kept.model_dump_json().encode() + b"\n")
    return kept
