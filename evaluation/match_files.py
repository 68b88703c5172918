"""A match as files of its run: every game as it ends, `scores/matches/<label>.jsonl`, and the whole, `<label>.json`.

The label names the question (who, against whom, from where, how long, which seed) and not how many games: asking for more goes on
where the games end, and a match that was broken off loses the games that were being played, no others.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from evaluation.contestants import Contestant
from evaluation.matches import GameResult
from evaluation.settings import MatchSettings
from evaluation.standings import MatchTable
from storage.files import make_directory
from storage.runs import RunPaths, durable_write
from telemetry.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchRecord:
    """One match: who played, how, and what came of it."""

    label: str
    settings: MatchSettings
    players: tuple[Contestant, ...]
    """Those measured, then the opponents of the other seats, if any."""
    table: MatchTable
    seconds: float
    """Wall time of the games played by the process that wrote this; 0 where all of them lay there."""


_RECORD, _GAME = TypeAdapter(MatchRecord), TypeAdapter(GameResult)
_NOT_THE_QUESTION = {"games", "width", "measure", "at_once", "bootstrap"}


def match_label(settings: MatchSettings, players: Sequence[Contestant]) -> str:
    """A name for the question that the match answers: equal for equal players, adapters included."""
    asked = settings.model_dump(mode="json", exclude=_NOT_THE_QUESTION)
    who = [(player.name, player.run, player.version, player.adapter_hash) for player in players]
    digest = hashlib.sha256(json.dumps([asked, who], sort_keys=True).encode()).hexdigest()[:8]
    names = "-".join(re.sub(r"[^A-Za-z0-9]+", ".", player.name) for player in players)
    return f"{names[:80]}-{settings.start}-{settings.years}y-{digest}"


def games_done(paths: RunPaths, label: str) -> dict[str, GameResult]:
    """Games of a match that have ended, by key; a line that was cut by a kill does not count."""
    file = paths.scores / "matches" / f"{label}.jsonl"
    done = {}
    for line in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            game = _GAME.validate_json(line)
        except ValidationError:
            continue
        done[game.key] = game
    return done


def keep_game(paths: RunPaths, label: str, game: GameResult) -> None:
    """Add a game that has ended; on a line of its own, whatever stood at the end of the file."""
    folder = paths.scores / "matches"
    make_directory(folder)
    with open(folder / f"{label}.jsonl", "ab") as file:
        file.write((b"\n" if file.tell() else b"") + _GAME.dump_json(game))


def write_match(paths: RunPaths, record: MatchRecord) -> None:
    """Keep the whole match; a former one of the same question is replaced."""
    folder = paths.scores / "matches"
    make_directory(folder)
    durable_write(folder / f"{record.label}.json", _RECORD.dump_json(record, indent=1))


def read_matches(paths: RunPaths) -> list[MatchRecord]:
    """All matches of a run, in the order in which they were finished.

    Raises:
        DataError: one is damaged.
    """
    found = []
    for file in sorted((paths.scores / "matches").glob("*.json"), key=lambda each: (each.stat().st_mtime_ns, each.name)):
        try:
            found.append(_RECORD.validate_json(file.read_bytes()))
        except ValidationError as error:
            raise DataError(f"{file} is no match of this version: delete it, and play it again") from error
    return found
