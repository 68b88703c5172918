"""Samples the start positions of a step, and the power that the policy plays in each.

A pure function of its arguments, including seed and step, so any step can be sampled again. A stratum is game year, type of
phase and balance of power.

    uniform     all positions have equal probability
    stratified  all strata have equal probability, and all positions within a stratum
    large       positions as in uniform; the power by the square of its units, because a large one wins games and orders most
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from entente.game.snapshot import Snapshot, units_of_powers
from entente.telemetry.errors import InputError

Sampling = Literal["uniform", "stratified", "large"]

BALANCES = ((5, "level"), (7, "ahead"), (34, "far ahead"))
"""Largest centre count of the leading power, and name of the stratum; each holds about a third of the positions that scripted
players reach by 1907."""


class Stratum(NamedTuple):
    """Positions of one year, one type of phase and one balance of power; sorts in that order."""

    year: int
    phase_type: str
    """"M", "R" or "A"."""
    balance: int
    """Index in BALANCES."""

    def __str__(self) -> str:
        return f"{self.year} {self.phase_type} {BALANCES[self.balance][1]}"


def stratum_of(snapshot: Snapshot) -> Stratum:
    most_centres = max(snapshot.centres)
    balance = next(index for index, (limit, _) in enumerate(BALANCES) if most_centres <= limit)
    return Stratum(snapshot.year, snapshot.phase_type, balance)


def count_strata(snapshots: Iterable[Snapshot]) -> dict[Stratum, int]:
    return dict(sorted(Counter(map(stratum_of, snapshots)).items()))


def sample_start_positions(
    snapshots: Sequence[Snapshot],
    count: int,
    seed: int,
    step: int,
    *,
    sampling: Sampling = "uniform",
) -> list[tuple[Snapshot, str]]:
    """`count` positions, each with a power that has units there: the one that the policy played up to here, else any.

    A position repeats only after all (with "stratified": all of its stratum) were sampled. Raises InputError if there are no
    positions.
    """
    if not snapshots:
        raise InputError("There are no positions to sample from. Build the state cache first.")
    # A string seed gives the same numbers in every process; a tuple's hash does not.
    rng = random.Random(f"start positions of step {step} with seed {seed}")
    sampled = (_sample_strata if sampling == "stratified" else _sample_uniform)(snapshots, count, rng)
    return [(snapshot, _sample_power(snapshot, rng, sampling)) for snapshot in sampled]


def _sample_power(snapshot: Snapshot, rng: random.Random, sampling: Sampling) -> str:
    units = units_of_powers(snapshot)
    if snapshot.power in units:
        return snapshot.power
    if sampling == "large":
        return rng.choices(list(units), [count**2 for count in units.values()])[0]
    return rng.choice(list(units))


def _sample_uniform(snapshots: Sequence[Snapshot], count: int, rng: random.Random) -> list[Snapshot]:
    sampled: list[Snapshot] = []
    while len(sampled) < count:
        sampled += rng.sample(snapshots, min(count - len(sampled), len(snapshots)))
    return sampled


def _sample_strata(snapshots: Sequence[Snapshot], count: int, rng: random.Random) -> list[Snapshot]:
    """Each round samples one position of each stratum, in random order."""
    members: dict[Stratum, list[Snapshot]] = {}
    for snapshot in snapshots:
        members.setdefault(stratum_of(snapshot), []).append(snapshot)
    remaining: dict[Stratum, list[Snapshot]] = {}
    sampled: list[Snapshot] = []
    while len(sampled) < count:
        for stratum in rng.sample(sorted(members), min(count - len(sampled), len(members))):
            if not remaining.get(stratum):
                remaining[stratum] = rng.sample(members[stratum], len(members[stratum]))
            sampled.append(remaining[stratum].pop())
    return sampled
