"""Where forks come from: a frozen position, or a game that is played up to there by inference; and how they are copied.

Stands for the old system's warm-up and its forking: of every rollout, 20 % start at once and the others play up to eight phases
from spring 1901, one generate call each, whose rows nobody keeps; then the whole game object is pickled once and loaded for each
fork (1.0 MB, about 100 ms a load, measured on its own code). Legal orders are listed once a phase, as it did. That the model
plays all seats of a warm-up is what its feature list says and what its clock agrees with (30 to 60 s of a rollout phase of 70 to
130 s); `Way.warm_up_all` off has it play the policy's seat only.
Kinder than it was: no phase may time out, and whoever has lost all units before the fork is not chosen.
"""

import random
from dataclasses import dataclass
from typing import Any

from benchmarks.old_way.stages import StageClock
from benchmarks.old_way.ways import Way
from game.board import Board
from game.settings import BoardPath
from game.snapshot import Snapshot

WARM_UP_PHASES, NO_WARM_UP = 8, 0.2
"""Phases of a warm-up, at most; share of rollouts without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start group."""

    number: int
    snapshot: Snapshot
    """Its frozen position; in the old way it only names the group."""
    power: str
    """The seat that the policy plays."""


def path_of(way: Way) -> BoardPath:
    """The path that boards play on."""
    return BoardPath.FAST if way.fast_board else BoardPath.PLAIN


def warm_up_phases(seed: int, number: int) -> int:
    """How many phases the warm-up of a start group plays."""
    dice = random.Random(f"warm-up {seed} {number}")
    return 0 if dice.random() < NO_WARM_UP else dice.randint(0, WARM_UP_PHASES)


def clones(way: Way, board: Board, forks: int, clock: StageClock) -> list[Board]:
    """Independent copies of `board`, which is used up."""
    with clock("clone"):
        if way.fast_board:
            return [board.fork() for _ in range(forks)]
        cloudpickle = _pickler()
        blob = cloudpickle.dumps(board._game)  # the pickle of a whole game is the point
        return [Board(cloudpickle.loads(blob)) for _ in range(forks)]


def restored(way: Way, start: Start, clock: StageClock) -> Board:
    """The frozen position, on the way's path."""
    with clock("clone"):
        return Board.restore(start.snapshot, path_of(way))


def power_of(board: Board, start: Start, clock: StageClock) -> str:
    """The seat of the policy: that of the start group, or another that still has units where a warm-up has ended it."""
    with clock("games"):
        if board.is_alive(start.power) and start.power in board.legal_orders():
            return start.power
        able = sorted(board.legal_orders())
        return able[start.number % len(able)] if able else start.power


def _pickler() -> Any:
    import cloudpickle  # comes with vLLM; the engine's game holds classes that plain pickle does not take

    return cloudpickle
