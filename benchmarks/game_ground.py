"""`game`: what a phase, a fork and a restored position cost.

Plays scripted games once, notes every order, and plays the notes again, so that what is timed is legal orders and
adjudication and not the players. CPU seconds, medians.
"""

import random
from collections.abc import Callable
from statistics import median

from benchmarks.outcome import Outcome, Target, cpu_seconds, median_ms
from game.board import Board
from game.players import player
from telemetry.errors import EngineError, InputError

Notes = list[dict[str, list[str]]]
"""A game as it was played: per phase, the orders of each power."""

PLAYERS = ("random", "mover")
"""Who plays the games, in turn: the first crowds the legal orders, the second the map."""
LAST_YEAR = 1908
"""Last game year of a game: about 25 phases."""
TARGETS = {
    "fork_ms": Target(at_most=0.1),
    "restore_ms": Target(at_most=0.15),
}


def bench_game(*, phases: int = 600, rounds: int = 5, seed: int = 0) -> Outcome:
    """Measure over at least `phases` phases, played `rounds` times.

    Raises:
        InputError: there is nothing to measure.
        EngineError: the same orders led to another position.
    """
    if phases < 1 or rounds < 1:
        raise InputError(f"There is nothing to measure in {phases} phases and {rounds} rounds: both are at least 1.")
    games = played_games(phases, seed)
    count = sum(len(notes) for notes, _ in games)
    seconds = [sum(_replayed(Board.start, notes, end) for notes, end in games) for _ in range(rounds)]
    middle = [_position_after(Board.start(), notes[: len(notes) // 2]) for notes, _ in games]
    metrics = {
        "phases": float(count),
        "games": float(len(games)),
        "phases_per_s": count / median(seconds),
        "fork_ms": median(median_ms(board.fork, rounds=rounds, calls=20) for board in middle),
        "restore_ms": median(_restore_ms(board, rounds) for board in middle),
    }
    return Outcome(benchmark="game", metrics=metrics, targets=TARGETS)


def played_games(phases: int, seed: int) -> list[tuple[Notes, str]]:
    """Games of at least `phases` phases together, each with its notes and the text of its last position."""
    games: list[tuple[Notes, str]] = []
    while sum(len(notes) for notes, _ in games) < phases:
        number = len(games)
        order, dice, board, notes = player(PLAYERS[number % len(PLAYERS)]), random.Random(f"{seed} {number}"), Board.start(), []
        while not board.is_over and board.year <= LAST_YEAR:
            notes.append({power: order(legal, dice) for power, legal in board.legal_orders().items()})
            board.step(notes[-1])
        games.append((notes, _text(board)))
    return games


def _replayed(start: Callable[[], Board], notes: Notes, end: str) -> float:
    """CPU seconds of a game played again: legal orders and the phase, each phase once."""
    board = start()

    def play() -> None:
        for orders in notes:
            board.legal_orders()
            board.step(orders)

    seconds = cpu_seconds(play)
    if _text(board) != end:
        raise EngineError(f"The same orders led to another position in {board.phase}: the paths of the game differ.")
    return seconds


def _position_after(board: Board, notes: Notes) -> Board:
    for orders in notes:
        board.step(orders)
    return board


def _restore_ms(board: Board, rounds: int) -> float:
    snapshot = board.snapshot(game_id="benchmark", seed=0, source="benchmark")
    return median_ms(lambda: Board.restore(snapshot), rounds=rounds, calls=20)


def _text(board: Board) -> str:
    """The position in full, or how a game that is over ended."""
    return board.phase + (str(board.centres()) if board.is_over else board.snapshot(game_id="", seed=0, source="").position)
