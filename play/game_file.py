"""The file of a played game: who played and what was ordered. Reading it plays the game again, so it holds no position."""

import asyncio
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from play.game import PlayedGame, Players
from storage.runs import durable_write
from telemetry.errors import InputError
from telemetry.read_file import read_text

_LARGEST = 4 << 20
"""Largest file, bytes; a game of a hundred years has less."""
_Text = Annotated[str, Field(max_length=64)]


class SavedTurn(BaseModel):
    """One phase."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    phase: _Text
    orders: dict[_Text, tuple[_Text, ...]]
    probabilities: dict[_Text, float] = {}


class SavedGame(BaseModel):
    """A game as its file holds it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["entente game 1"] = "entente game 1"
    name: _Text
    seed: int = 0
    seats: dict[_Text, Annotated[str, Field(max_length=256)]]
    turns: tuple[SavedTurn, ...] = ()
    given: dict[_Text, tuple[_Text, ...]] = {}
    """Orders of people for the phase after the last turn."""


def saved(game: PlayedGame) -> SavedGame:
    """The game in the form of its file."""
    turns = (
        SavedTurn(phase=turn.board.phase, orders=dict(turn.orders), probabilities=dict(turn.probabilities)) for turn in game.turns
    )
    return SavedGame(name=game.name, seed=game.seed, seats=game.seats, turns=tuple(turns), given=dict(game.given))


class GameFile:
    """The file of a game that is played."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._turn = asyncio.Lock()

    async def write(self, game: PlayedGame) -> None:
        """Replace the content by the game as it is; after a crash the file has the old or the new content.

        Raises:
            InputError: it cannot be written.
        """
        async with self._turn:
            content = saved(game).model_dump_json().encode() + b"\n"
            try:
                await asyncio.to_thread(durable_write, self.file, content)
            except OSError as error:
                raise InputError(
                    f"the game cannot be stored in '{self.file}': {error.strerror}; make room, then order again"
                ) from error


def read_game(file: Path) -> SavedGame:
    """The content of a game's file.

    Raises:
        InputError: it cannot be read, or is no game of this program.
    """
    try:
        return SavedGame.model_validate_json(read_text(file, at_most=_LARGEST, what="game file"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"game file '{file}' is no game of this program: {where or 'its text'}: {first['msg']}") from error


def open_game(stored: SavedGame, players: Players, file: Path) -> PlayedGame:
    """The game at its last position.

    Raises:
        InputError: a player is not here, or the game cannot be played as it is stored.
    """
    game = PlayedGame(stored.name, stored.seats, players, seed=stored.seed)
    for turn in stored.turns:
        if turn.phase != game.board.phase:
            raise InputError(f"game file '{file}' was changed: it has {turn.phase} where the game is in {game.board.phase}")
        try:
            game.replay(turn.orders, turn.probabilities)
        except InputError as error:
            raise InputError(f"game file '{file}' was changed: {error}") from error
    legal = game.board.legal_orders()
    for power, own in stored.given.items():
        if power not in game.waits_for or not legal[power].admits(own):
            raise InputError(f"game file '{file}' was changed: {power} cannot give its orders in {game.board.phase}")
        game.given[power] = own
    return game
