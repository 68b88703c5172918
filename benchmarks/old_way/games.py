"""The position that forks start from, and how it is copied.

As the old system: 20 % of the rollouts start at once, the others first play up to eight phases from spring 1901 by inference, one
generate call a phase, and keep no rows of them. The game object is then pickled once and loaded for every fork (1.0 MB, about
100 ms a load). In a warm-up the model plays all powers; without `Way.warm_up_all` it plays only the policy's power.
Cheaper than the original: no phase times out, and a power without units before the fork is not chosen.
"""

import random
from dataclasses import dataclass

from benchmarks.old_way.stages import StageClock
from benchmarks.old_way.ways import Way
from game.board import POWERS, Board
from game.settings import BoardPath
from game.snapshot import Snapshot

WARM_UP_PHASES, NO_WARM_UP = 8, 0.2
"""Largest number of phases of a warm-up, and the share of rollouts without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start group."""

    number: int
    snapshot: Snapshot
    """The frozen position; in the old way only its id is used."""
    power: str | None
    """The power that the policy plays; None: all seven."""


def path_of(way: Way) -> BoardPath:
    """The implementation that boards use."""
    return BoardPath.FAST if way.fast_board else BoardPath.PLAIN


def warm_up_phases(seed: int, number: int) -> int:
    """Number of phases that the warm-up of a start group plays."""
    dice = random.Random(f"warm-up {seed} {number}")
    return 0 if dice.random() < NO_WARM_UP else dice.randint(0, WARM_UP_PHASES)


def clones(way: Way, board: Board, forks: int, clock: StageClock) -> list[Board]:
    """Independent copies of `board`, which must not be used afterwards."""
    with clock("clone"):
        if way.fast_board:
            return [board.fork() for _ in range(forks)]
        import cloudpickle  # comes with vLLM; plain pickle does not accept the classes in a game

        blob = cloudpickle.dumps(board._game)  # the old system pickled the whole game, so this needs the private attribute
        return [Board(cloudpickle.loads(blob)) for _ in range(forks)]


def restored(way: Way, start: Start, clock: StageClock) -> Board:
    """The board of the frozen position."""
    with clock("clone"):
        return Board.restore(start.snapshot, path_of(way))


def powers_of(board: Board, start: Start, clock: StageClock) -> tuple[str, ...]:
    """The policy's powers: those of the start group, or another one if its only one has no units after the warm-up."""
    if start.power is None:
        return POWERS
    with clock("games"):
        able = sorted(board.legal_orders())
        if not able or (start.power in able and board.is_alive(start.power)):
            return (start.power,)
        return (able[start.number % len(able)],)
