"""Draws the positions that a step's rollouts start from, and the power that the policy plays in each.

Promises: the draw depends on its arguments alone, seed and step among them, so a step can be drawn again at any
time and in any order. Reads no file: what past groups taught comes from the caller as plain numbers.

    uniform     every position alike
    stratified  every stratum alike, and every position of a stratum
    learnable   positions whose past groups had spread in their returns come more often: prioritised level replay
                (Jiang et al. 2021), with the spread in the place of the value loss; a floor keeps every position in play
"""

import random
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

from game.snapshot import Snapshot, powers_with_units
from state_cache.strata import Stratum, stratum_of
from telemetry.errors import InputError

Sampling = Literal["uniform", "stratified", "learnable"]

FLOOR = 0.25
"""Share of the learnable draws that is uniform: a position without spread still comes at a quarter of the usual rate."""


def sample_start_positions(
    snapshots: Sequence[Snapshot],
    count: int,
    seed: int,
    step: int,
    *,
    sampling: Sampling = "uniform",
    spreads: Mapping[str, float] | None = None,
) -> list[tuple[Snapshot, str]]:
    """`count` positions, each with a power that still has units there.

    None comes twice before all were drawn; where strata are drawn alike, before all of its stratum were.

    Args:
        spreads: mean spread of the returns of past groups by snapshot id, for "learnable"; a position that is not
            among them counts as one of middling spread.

    Raises:
        InputError: there is nothing to draw from.
    """
    if not snapshots:
        raise InputError("There are no positions to draw from. Build the state cache first.")
    # Seeded with a text: Python hashes it the same way in every process, unlike a tuple.
    rng = random.Random(f"start positions of step {step} with seed {seed}")
    if sampling == "stratified":
        drawn = _draw_strata(snapshots, count, rng)
    elif sampling == "learnable" and (weights := learnable_weights(snapshots, spreads or {})):
        drawn = _draw_weighted(snapshots, weights, count, rng)
    else:
        drawn = _draw_uniform(snapshots, count, rng)
    return [(snapshot, rng.choice(powers_with_units(snapshot))) for snapshot in drawn]


def learnable_weights(snapshots: Sequence[Snapshot], spreads: Mapping[str, float]) -> list[float]:
    """Probability of each position in a single learnable draw; [] while nothing is known of any of them."""
    known = [spreads[snapshot.snapshot_id] for snapshot in snapshots if snapshot.snapshot_id in spreads]
    if not any(known):
        return []
    middling = fmean(known)
    scores = [spreads.get(snapshot.snapshot_id, middling) for snapshot in snapshots]
    total = sum(scores)
    return [FLOOR / len(scores) + (1 - FLOOR) * score / total for score in scores]


def _draw_uniform(snapshots: Sequence[Snapshot], count: int, rng: random.Random) -> list[Snapshot]:
    drawn: list[Snapshot] = []
    while len(drawn) < count:
        drawn += rng.sample(snapshots, min(count - len(drawn), len(snapshots)))
    return drawn


def _draw_strata(snapshots: Sequence[Snapshot], count: int, rng: random.Random) -> list[Snapshot]:
    """Round after round, one position of each stratum, the strata of a round in any order."""
    members: dict[Stratum, list[Snapshot]] = {}
    for snapshot in snapshots:
        members.setdefault(stratum_of(snapshot), []).append(snapshot)
    left: dict[Stratum, list[Snapshot]] = {}
    drawn: list[Snapshot] = []
    while len(drawn) < count:
        for stratum in rng.sample(sorted(members), min(count - len(drawn), len(members))):
            if not left.get(stratum):
                left[stratum] = rng.sample(members[stratum], len(members[stratum]))
            drawn.append(left[stratum].pop())
    return drawn


def _draw_weighted(snapshots: Sequence[Snapshot], weights: Sequence[float], count: int, rng: random.Random) -> list[Snapshot]:
    """Without putting back: the positions of the earliest arrivals, each arriving at a rate of its weight."""
    drawn: list[Snapshot] = []
    while len(drawn) < count:
        arrivals = sorted((rng.expovariate(weight), place) for place, weight in enumerate(weights))
        drawn += [snapshots[place] for _, place in arrivals[: count - len(drawn)]]
    return drawn
