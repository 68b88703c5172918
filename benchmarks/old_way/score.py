"""What a version of the old way is worth: centres gained on held-out positions, as `evaluation` measures ours.

The same positions, powers, opponents, dice and horizon, and the same interval; only prompts and engine are those that the version
was trained with. Counting is the same in both: a way that cannot say its orders loses centres, nothing else.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.old_way.games import Start, path_of
from benchmarks.old_way.play import Table, _Fork
from evaluation.intervals import estimate
from evaluation.settings import EvaluationSettings
from game.board import POWERS, Board
from game.snapshot import Snapshot
from rollouts.seeds import dice


async def score(table: Table, held_out: Sequence[Snapshot], settings: EvaluationSettings, opponents: str) -> dict[str, Any]:
    """Mean centres gained of one seat in each position, with its interval clustered by source game (`ci`; None for too few)."""
    chosen = list(held_out[: settings.positions])
    pairs = [(snapshot, power) for snapshot in chosen for power in _powers(snapshot, settings)]
    table.opponents = opponents

    async def gain(place: int, snapshot: Snapshot, power: str) -> float:
        board = Board.restore(snapshot, path_of(table.way))
        name = f"evaluation/{settings.seed}/{snapshot.snapshot_id}/{power}"
        fork = _Fork(
            number=0, board=board, shared=name, power=power, group=place, start=board.phase, years=settings.horizon_years
        )
        start, seat = Start(number=place, snapshot=snapshot, power=power), POWERS.index(power)
        before = board.centre_counts()[seat]
        await table._play_alone(fork, start)
        return float(fork.board.centre_counts()[seat] - before)

    gains = np.array(await asyncio.gather(*(gain(place, *pair) for place, pair in enumerate(pairs))))
    games = np.array([snapshot.game_id for snapshot, _ in pairs])
    found = estimate(gains, games, settings.bootstrap, settings.seed)
    return {"mean": found.mean, "ci": found.rounded(), "forks": len(pairs)}


def _powers(snapshot: Snapshot, settings: EvaluationSettings) -> list[str]:
    """As in `evaluation.strength`: a seeded sample of those that have something to order there."""
    able = list(Board.restore(snapshot).legal_orders())
    generator = dice("evaluation-powers", settings.seed, snapshot.snapshot_id)
    return sorted(generator.sample(able, min(settings.powers_per_position, len(able))))
