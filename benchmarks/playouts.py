"""`search`: years of DumbBot against DumbBot that one process plays out in a CPU second, compared with the path of forks.

Both arms play the same games with the same dice from spring positions, in turn. The arm of forks checks and records each phase.
A playout of one year leaves out its winter, which cannot change the value; of four years it plays three winters.
"""

import asyncio
import random
from statistics import median

from benchmarks.outcome import Outcome, Target, cpu_seconds
from game.board import POWERS, Board
from game.players import player
from rollouts.fork import ForkPlan, play_fork
from rollouts.seeds import dice
from search.playouts import play_out
from search.settings import SearchSettings
from telemetry.errors import EngineError, InputError

TARGETS = {"four_years_per_cpu_s": Target(at_least=70.0)}
_PLAYER = "dumbbot"
_LAST_YEAR = 1906
"""Positions are springs from 1901 to this year."""


def bench_search(*, positions: int = 12, rounds: int = 5, seed: int = 0) -> Outcome:
    """Play out `positions` spring positions in each of `rounds` rounds.

    Raises:
        InputError: `positions` or `rounds` is below 1.
        EngineError: the two arms had different values.
    """
    if positions < 1 or rounds < 1:
        raise InputError(f"There is nothing to measure in {positions} positions and {rounds} rounds: both are at least 1.")
    springs = spring_positions(positions, seed)
    figures: dict[str, float] = {}
    for word, years in (("one_year", 1), ("four_years", 4)):
        fast, slow = zip(*(_one_round(springs, years, f"{seed}/{number}") for number in range(rounds)), strict=True)
        figures[f"{word}_speedup"] = median(fork / quick for quick, fork in zip(fast, slow, strict=True))
        figures[f"{word}_per_cpu_s"] = positions * years / median(fast)
        figures[f"{word}_forks_per_cpu_s"] = positions * years / median(slow)
    return Outcome(benchmark="search", metrics={"positions": float(positions)} | figures, targets=TARGETS)


def spring_positions(count: int, seed: int) -> list[Board]:
    """Spring movement phases of games of DumbBots."""
    found: list[Board] = []
    while len(found) < count:
        rng, board = random.Random(f"{seed} {len(found)}"), Board.start()
        while not board.is_over and board.year <= _LAST_YEAR and len(found) < count:
            if board.phase_type == "M" and board.season == "S":
                found.append(board.fork())
            board.step({power: player(_PLAYER)(legal, rng, board) for power, legal in board.legal_orders().items()})
    return found


def _one_round(springs: list[Board], years: int, name: str) -> tuple[float, float]:
    """CPU seconds of all playouts by the fast path and by forks, in turn; each power of the game is searched in turn."""
    fast = slow = 0.0
    for number, board in enumerate(springs):
        power, values = list(board.legal_orders())[number % len(board.legal_orders())], []

        def play(board: Board = board, power: str = power, values: list[float] = values) -> None:
            values.append(_fast(board.fork(), power, years, name))

        def fork(board: Board = board, power: str = power, values: list[float] = values) -> None:
            values.append(_forked(board.fork(), power, years, name))

        fast += cpu_seconds(play)
        slow += cpu_seconds(fork)
        if len(set(values)) > 1:
            raise EngineError(f"a playout from {board.phase} has the value {values[0]}, and as a fork {values[1]}: report this")
    return fast, slow


def _fast(board: Board, power: str, years: int, name: str) -> float:
    orders = player(_PLAYER)(board.legal_orders()[power], dice(name, board.phase, power), board)
    return play_out(board, power, orders, name, SearchSettings(years=years))


def _forked(board: Board, power: str, years: int, name: str) -> float:
    plan = ForkPlan(
        name=name,
        shared_name=name,
        seats={seat: _PLAYER for seat in POWERS},
        horizon_years=years,
        temperature=1.0,
        snapshot_id="",
    )
    fork = asyncio.run(play_fork(plan, board, None, None, record_plies=False))
    assert fork.end is not None, "scripted games do not fail"
    return float(fork.end.centres[POWERS.index(power)])
