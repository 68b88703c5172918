"""Draws the positions that a step's rollouts start from, and the power that the policy plays in each.

Promises: the draw depends on the seed and the step alone, so a step can be drawn again at any time and in any
order. Reads no file.
"""

import random
from collections.abc import Sequence

from game.snapshot import Snapshot, powers_with_units
from telemetry.errors import InputError


def sample_start_positions(snapshots: Sequence[Snapshot], count: int, seed: int, step: int) -> list[tuple[Snapshot, str]]:
    """`count` positions, none twice before all were drawn, each with a power that still has units there.

    Raises:
        InputError: there is nothing to draw from.
    """
    if not snapshots:
        raise InputError("There are no positions to draw from. Build the state cache first.")
    # Seeded with a text: Python hashes it the same way in every process, unlike a tuple.
    rng = random.Random(f"start positions of step {step} with seed {seed}")
    drawn: list[Snapshot] = []
    while len(drawn) < count:
        drawn += rng.sample(snapshots, min(count - len(drawn), len(snapshots)))
    return [(snapshot, rng.choice(powers_with_units(snapshot))) for snapshot in drawn]
