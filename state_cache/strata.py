"""Strata of positions: game year, type of phase, and balance of power, computed from a snapshot's columns."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from entente.game.snapshot import Snapshot

BALANCES = ((5, "level"), (7, "ahead"), (34, "far ahead"))
"""Largest centre count of the leading power, and the name of the stratum.

Each holds about a third of the positions that scripted players reach by 1907.
"""


class Stratum(NamedTuple):
    """Positions of one year, one type of phase and one balance of power; sorts in that order."""

    year: int
    """Game year."""
    phase_type: str
    """"M", "R" or "A"."""
    balance: int
    """Index in BALANCES."""

    def __str__(self) -> str:
        return f"{self.year} {self.phase_type} {BALANCES[self.balance][1]}"


def stratum_of(snapshot: Snapshot) -> Stratum:
    """The stratum of a position."""
    most_centres = max(snapshot.centres)
    balance = next(index for index, (limit, _) in enumerate(BALANCES) if most_centres <= limit)
    return Stratum(snapshot.year, snapshot.phase_type, balance)


def count_strata(snapshots: Iterable[Snapshot]) -> dict[Stratum, int]:
    """Number of positions per stratum, sorted by stratum; empty strata are missing."""
    return dict(sorted(Counter(map(stratum_of, snapshots)).items()))
