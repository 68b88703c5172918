"""Files of a match, in `scores/matches/` of a run, or in `_matches/` under `runs_root` if no player belongs to a run.

    <label>.jsonl             each game, appended when it ends
    <label>.json              the result
    <label>.answers.jsonl     answers of endpoints

The label identifies players, opponents, start with its positions, years, seed, the token limit of endpoints and the code that
plays, but not the number of games: a request for more games continues the match, unless the program plays differently now. An
interruption loses only the games in progress.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from entente.evaluation.contestants import Contestant
from entente.evaluation.match_table import MatchTable
from entente.evaluation.matches import GameResult
from entente.evaluation.settings import MatchSettings
from entente.game.snapshot import Snapshot
from entente.telemetry.errors import DataError
from entente.telemetry.read_file import open_regular
from storage.control import code_of_play
from storage.files import durable_write, make_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchRecord:
    label: str
    settings: MatchSettings
    players: tuple[Contestant, ...]
    """The measured players, then the opponents, if any."""
    table: MatchTable
    cpu_seconds_a_game: float = 0.0
    """Over the games that the writing process played, including the start of worker processes; 0 if it played none."""
    finished: float = 0.0
    """Unix time at which its last game ended, seconds; 0 in files that were written without it."""
    environment: dict[str, str] = field(default_factory=dict)


_RECORD, _GAME = TypeAdapter(MatchRecord), TypeAdapter(GameResult)
_NOT_IN_LABEL = {"protocol", "games", "measure", "concurrency", "endpoint"}


def match_label(settings: MatchSettings, players: Sequence[Contestant], held_out: Sequence[Snapshot] = ()) -> str:
    """The label of a match; equal for equal settings, players (with the hashes of their weights and of their form), held-out
    positions to start from, and code."""
    searches = any(player.searches_by(settings) for player in players)
    question = settings.model_dump(mode="json", exclude=_NOT_IN_LABEL | (set() if searches else {"search"}))
    if any(player.is_endpoint for player in players):  # the token budget limits how much is played, and not how
        question["answer_tokens"] = settings.endpoint.answer_tokens
    if held_out:  # a state cache that was lost and built again may hold others
        question["positions"] = [(start.game_id, start.position) for start in held_out]
    who = [
        (player.name, player.run, player.version, player.adapter_hash, *filter(None, (player.weights_hash, player.form)))
        for player in players
    ]
    scripted = [player.name for player in players if not player.is_policy]
    code = code_of_play([*scripted, *settings.search.scripted, *settings.search.player] if searches else scripted)
    digest = hashlib.sha256(json.dumps([question, who, code], sort_keys=True).encode()).hexdigest()[:8]
    # A leading dot, of an absolute path, would hide the file.
    names = "-".join(re.sub(r"[^A-Za-z0-9]+", ".", player.name).lstrip(".") for player in players)
    return f"{names[:80]}-{settings.start}-{settings.years}y-{digest}"


def read_games(folder: Path, label: str) -> dict[str, GameResult]:
    """Finished games of a match, by key; skips an incomplete line."""
    file = folder / f"{label}.jsonl"
    games = {}
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            game = _GAME.validate_json(line)
        except ValidationError:
            continue
        games[game.key] = game
    return games


def append_game(folder: Path, label: str, game: GameResult) -> None:
    """Append a finished game on a new line, even if the last line of the file is incomplete."""
    make_directory(folder)
    with open(folder / f"{label}.jsonl", "ab") as file:
        file.write((b"\n" if file.tell() else b"") + _GAME.dump_json(game))


def answers_file(folder: Path, label: str) -> Path:
    return folder / f"{label}.answers.jsonl"


def write_match(folder: Path, record: MatchRecord) -> None:
    make_directory(folder)
    durable_write(folder / f"{record.label}.json", _RECORD.dump_json(record, indent=1))


def read_matches(folder: Path) -> list[MatchRecord]:
    """All matches of a folder, the first finished first."""
    return sorted(map(read_match, folder.glob("*.json")), key=lambda match: (match.finished, match.label))


def read_match(file: Path) -> MatchRecord:
    try:
        with open_regular(file) as stream:
            return _RECORD.validate_json(stream.read())
    except ValidationError as error:
        raise DataError(f"{file} is not a match of this version: delete it, and run the match again") from error
