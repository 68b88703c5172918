"""Stores a game in its file, and restores it. The format is in `storage/played_games.py`."""

import asyncio
from pathlib import Path

from entente.live_games.game import PlayedGame, Players
from entente.telemetry.errors import InputError
from storage.files import durable_write
from storage.played_games import SavedGame, SavedTurn


def saved(game: PlayedGame) -> SavedGame:
    turns = (
        SavedTurn(
            phase=turn.board.phase,
            orders=dict(turn.orders),
            probabilities=dict(turn.probabilities),
            proposals=dict(turn.proposals),
        )
        for turn in game.turns
    )
    return SavedGame(
        name=game.name, seed=game.seed, years=game.years, seats=game.seats, turns=tuple(turns), given=dict(game.pending)
    )


class GameFile:
    def __init__(self, file: Path) -> None:
        self.file = file
        self._turn = asyncio.Lock()

    async def write(self, game: PlayedGame) -> None:
        async with self._turn:
            content = saved(game).model_dump_json().encode() + b"\n"
            try:
                await asyncio.to_thread(durable_write, self.file, content)
            except OSError as error:
                raise InputError(
                    f"the game cannot be stored in '{self.file}': {error.strerror}; free disk space, then order again"
                ) from error


def open_game(stored: SavedGame, players: Players, file: Path) -> PlayedGame:
    """The game at its last position. Raises InputError if it lacks a power, or the stored orders are not legal."""
    game = PlayedGame(stored.name, stored.seats, players, seed=stored.seed, years=stored.years)
    for turn in stored.turns:
        if turn.phase != game.board.phase:
            raise InputError(f"game file '{file}' was changed: it has {turn.phase} where the game is in {game.board.phase}")
        try:
            game.replay(turn.orders, turn.probabilities, turn.proposals)
        except InputError as error:
            raise InputError(f"game file '{file}' was changed: {error}") from error
    legal = game.board.legal_orders()
    for power, own in stored.given.items():
        if power not in game.waits_for or not legal[power].admits(own):
            raise InputError(f"game file '{file}' was changed: {power} cannot give its orders in {game.board.phase}")
        game.pending[power] = own
    return game
