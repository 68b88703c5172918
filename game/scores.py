"""What a stretch of play was worth to a power, as named components.

Owns the components of a reward and the horizon. Each component is a difference between two standings, so that
over consecutive stretches they add up to the last minus the first; how they blend into a return is the run's
choice, made elsewhere.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from game.snapshot import POWERS
from telemetry.errors import InputError

if TYPE_CHECKING:  # Only for its type: stored rows are scored and checked without loading the engine.
    from game.board import Board

COMPONENTS = ("centres_gained", "sos_share", "survival")
"""Reward components of a decision row, in the order of its columns."""

SOLO_CENTRES = 18
"""Centres that win alone: more than half of 34."""

_PHASES_OF_A_YEAR = ("SM", "SR", "FM", "FR", "WA")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How the powers stand at one moment."""

    centres: tuple[int, ...]
    """Supply centres owned, one count per power of POWERS."""

    def sos_share(self, power: str) -> float:
        """Share of the sum of squared centre counts, 0 to 1; after a solo the winner has 1 and the others 0.

        The score of the public research code for games cut off before their end: it rewards leading more than
        keeping up.
        """
        own = self.centres[POWERS.index(power)]
        if max(self.centres) >= SOLO_CENTRES:
            return float(own >= SOLO_CENTRES)
        return own**2 / max(1, sum(count**2 for count in self.centres))

    def survival(self, power: str) -> float:
        """1 while the power owns a centre, else 0."""
        return float(self.centres[POWERS.index(power)] > 0)

    def centre_count(self, power: str) -> float:
        """Centres owned by the power."""
        return float(self.centres[POWERS.index(power)])


_MEASURES: dict[str, Callable[[Standing, str], float]] = {
    "centres_gained": Standing.centre_count,
    "sos_share": Standing.sos_share,
    "survival": Standing.survival,
}


def standing(board: "Board") -> Standing:
    """How the powers of `board` stand now."""
    return Standing(centres=board.centre_counts())


def components(before: Standing, after: Standing, power: str) -> dict[str, float]:
    """What changed for `power` between two standings, one value per name of COMPONENTS."""
    return {name: _MEASURES[name](after, power) - _MEASURES[name](before, power) for name in COMPONENTS}


def horizon_reached(start_phase: str, phase: str, years: int) -> bool:
    """True when `phase` lies at least `years` game years after `start_phase`, or the game is over.

    A rollout from "F1903M" over 2 years plays on while this is false, and so ends before "F1905M". Phases
    that are skipped for want of anything to order do not delay it.

    Raises:
        InputError: a phase name is not one.
    """
    if phase == "COMPLETED":
        return True
    return _phase_index(phase) - _phase_index(start_phase) >= years * len(_PHASES_OF_A_YEAR)


def _phase_index(phase: str) -> int:
    kind, year = phase[:1] + phase[-1:], phase[1:-1]
    if kind not in _PHASES_OF_A_YEAR or not year.isdigit():
        raise InputError(f"{phase!r} is not the name of a phase such as 'S1903M' or 'W1905A'.")
    return int(year) * len(_PHASES_OF_A_YEAR) + _PHASES_OF_A_YEAR.index(kind)
