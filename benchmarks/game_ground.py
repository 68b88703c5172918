"""`game`: the cost of a phase, a fork and a restored position, in median CPU seconds.

The benchmark records the orders of scripted games and replays them, to measure only legal orders and adjudication. The baseline
arm uses the engine's public calls, with legal orders once per phase, and `copy.deepcopy`.
"""

import copy
import random
from statistics import median

from benchmarks.outcome import Outcome, Target, cpu_seconds, median_ms
from entente.game.board import Board
from entente.game.plain import plain_board
from entente.game.scripted import player
from entente.telemetry.errors import EngineError

Notes = list[dict[str, list[str]]]
"""A recorded game: orders by power, for each phase."""

PLAYERS = ("random", "mover")
LAST_YEAR = 1908
TARGETS = {
    "speedup": Target(at_least=3.0),
    "fork_ms": Target(at_most=0.1),
    "restore_ms": Target(at_most=0.15),
    "fork_vs_deepcopy": Target(at_least=2000.0),
}


def bench_game(*, phases: int = 600, rounds: int = 5, seed: int = 0) -> Outcome:
    """Measure over at least `phases` phases, played `rounds` times. Raises EngineError if the same orders led to another
    position."""
    games = played_games(phases, seed)
    count = sum(len(notes) for notes, _ in games)
    fast, plain = zip(*(_one_round(games) for _ in range(rounds)), strict=True)
    middle = [_position_after(Board.start(), notes[: len(notes) // 2]) for notes, _ in games]
    fork_ms = median(median_ms(board.fork, rounds=rounds, calls=20) for board in middle)
    metrics = {
        "phases": float(count),
        "games": float(len(games)),
        "speedup": median(slow / quick for quick, slow in zip(fast, plain, strict=True)),
        "phases_per_s": count / median(fast),
        "plain_phases_per_s": count / median(plain),
        "fork_ms": fork_ms,
        "restore_ms": median(_restore_ms(board, rounds) for board in middle),
        "fork_vs_deepcopy": _deepcopy_ms(games) / fork_ms,
    }
    return Outcome(benchmark="game", metrics=metrics, targets=TARGETS)


def played_games(phases: int, seed: int) -> list[tuple[Notes, str]]:
    """Games with at least `phases` phases in total: orders and final position of each."""
    games: list[tuple[Notes, str]] = []
    while sum(len(notes) for notes, _ in games) < phases:
        number = len(games)
        order, rng, board, notes = player(PLAYERS[number % len(PLAYERS)]), random.Random(f"{seed} {number}"), Board.start(), []
        while not board.is_over and board.year <= LAST_YEAR:
            notes.append({power: order(legal, rng, board) for power, legal in board.legal_orders().items()})
            board.step(notes[-1])
        games.append((notes, _text(board)))
    return games


def _one_round(games: list[tuple[Notes, str]]) -> tuple[float, float]:
    fast = plain = 0.0
    for notes, end in games:
        fast += _replayed(Board.start(), notes, end)
        plain += _replayed(plain_board(), notes, end)
    return fast, plain


def _replayed(board: Board, notes: Notes, end: str) -> float:
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


def _deepcopy_ms(games: list[tuple[Notes, str]]) -> float:
    return median(
        median_ms(lambda board=board: copy.deepcopy(board), rounds=1, calls=1)
        for board in (_position_after(plain_board(), notes[: len(notes) // 2]) for notes, _ in games[:4])
    )


def _restore_ms(board: Board, rounds: int) -> float:
    snapshot = board.snapshot(game_id="benchmark", seed=0, source="benchmark")
    return median_ms(lambda: Board.restore(snapshot), rounds=rounds, calls=20)


def _text(board: Board) -> str:
    return board.phase + (str(board.centres()) if board.is_over else board.snapshot(game_id="", seed=0, source="").position)
