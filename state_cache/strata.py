"""Which positions resemble one another: strata by game year, kind of phase, and balance of power.

Pure: a stratum is read off a snapshot's own columns. Owns the words for the balance of power.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from game.snapshot import Snapshot

BALANCES = ((5, "level"), (7, "ahead"), (34, "far ahead"))
"""Most centres of the leading power, and the word for it: about a third of what scripted players reach by 1907 each."""


class Stratum(NamedTuple):
    """Positions of one year, one kind of phase and one balance of power; sorts by them."""

    year: int
    """Game year."""
    phase_type: str
    """"M", "R" or "A"."""
    balance: int
    """Place in BALANCES."""

    def __str__(self) -> str:
        return f"{self.year} {self.phase_type} {BALANCES[self.balance][1]}"


def stratum_of(snapshot: Snapshot) -> Stratum:
    """The stratum of a position."""
    lead = max(snapshot.centres)
    balance = next(place for place, (most, _) in enumerate(BALANCES) if lead <= most)
    return Stratum(snapshot.year, snapshot.phase_type, balance)


def count_strata(snapshots: Iterable[Snapshot]) -> dict[Stratum, int]:
    """Positions per stratum that has any, in order."""
    return dict(sorted(Counter(map(stratum_of, snapshots)).items()))
