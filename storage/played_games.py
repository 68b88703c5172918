"""Games that people play in the browser, `runs/_games/<name>.json`: who played, the orders, and what the players considered.

Holds orders, and positions only where another server adjudicated differently. Reading replays the game, so illegal orders are
refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from entente.game.board import Board, PhaseResult
from entente.game.snapshot import Snapshot, make_snapshot
from entente.telemetry.errors import DataError, InputError, first_problem
from entente.telemetry.read_file import read_text

HUMAN = "human"
"""Name of a seat that a person plays."""
_LARGEST = 64 << 20
"""Largest file, bytes; a game of twenty years is smaller, also if all powers search with the most proposals."""
_Text = Annotated[str, Field(max_length=64)]
_Player = Annotated[str, Field(max_length=256)]


class SavedProposal(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    orders: tuple[_Text, ...]
    value: float
    """Mean over its playouts, in the unit of the search."""
    playouts: int
    probability: float | None = None
    """Probability with which the policy sampled it; None if no policy did."""


class SavedTurn(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    phase: _Text
    orders: dict[_Text, tuple[_Text, ...]]
    position: str = ""
    """Text of the position if another server adjudicated the turn before differently; else empty."""
    probabilities: dict[_Text, float] = {}
    proposals: dict[_Text, tuple[SavedProposal, ...]] = {}
    """Order sets that searching players tried, by power."""


class SavedGame(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["entente game 1"] = "entente game 1"
    name: _Text
    seed: int = 0
    years: Annotated[int, Field(ge=0, le=100)] = 0
    """Game years after which it ends; 0: when a power has won."""
    seats: dict[_Text, _Player]
    turns: tuple[SavedTurn, ...] = ()
    given: dict[_Text, tuple[_Text, ...]] = {}
    """Orders of people for the phase after the last turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPhase:
    turn: SavedTurn
    before: Snapshot
    centres: tuple[int, ...]
    """Supply centres after it, int per power of POWERS."""
    result: PhaseResult


def read_game(file: Path) -> SavedGame:
    """Raises InputError if the file cannot be read, or is not a game of this program."""
    try:
        return SavedGame.model_validate_json(read_text(file, at_most=_LARGEST, what="game file"))
    except ValidationError as error:
        raise InputError(f"game file '{file}' is not a game of this program: {first_problem(error)}") from error


def play_again(game: SavedGame, file: Path) -> Iterator[PlayedPhase]:
    """The phases of the game, in order; raises InputError if it cannot be replayed as stored."""
    board, source = Board.start(), f"played:{'+'.join(sorted(set(game.seats.values())))}"
    for turn in game.turns:
        if turn.position:
            board = _board(turn, file)
        legal = board.legal_orders()
        legal_sets = set(turn.orders) == set(legal) and all(legal[power].admits(own) for power, own in turn.orders.items())
        if turn.phase != board.phase or not legal_sets:
            raise InputError(f"game file '{file}' was changed: its orders of {turn.phase} are not legal in {board.phase}")
        before = board.snapshot(game_id=f"played-{game.name}", seed=game.seed, source=source)
        result = board.step(turn.orders)
        yield PlayedPhase(turn=turn, before=before, centres=board.centre_counts(), result=result)


def _board(turn: SavedTurn, file: Path) -> Board:
    try:
        return Board.restore(make_snapshot(turn.position, turn.phase, source="", game_id="", seed=0))
    except (DataError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"game file '{file}' was changed: it holds no position of {turn.phase}") from error
