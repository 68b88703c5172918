"""What a stretch of play was worth to a power, as named components.

Owns the components of a reward and the horizon. Each component is a difference between two standings, so that
over consecutive stretches they add up to the last minus the first; how they blend into a return is the run's
choice, made elsewhere. Whatever is counted (dislodgements, void and bounced orders) is counted since the fork,
and a difference of counts is what happened in between.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from game.snapshot import POWERS
from telemetry.errors import InputError

if TYPE_CHECKING:  # Only for its type: stored rows are scored and checked without loading the engine.
    from game.board import Board, PhaseResult

SOLO_CENTRES = 18
"""Centres that win alone: more than half of 34."""

_NONE = (0,) * len(POWERS)
_PHASES_OF_A_YEAR = ("SM", "SR", "FM", "FR", "WA")


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How the powers stand at one moment, and what befell them since the fork; one number per power of POWERS."""

    centres: tuple[int, ...]
    """Supply centres owned."""
    dislodged: tuple[int, ...] = _NONE
    """Units of others that its moves drove out."""
    driven_out: tuple[int, ...] = _NONE
    """Own units that others drove out, whether they could retreat or not."""
    void: tuple[int, ...] = _NONE
    """Own orders that came to nothing because what they referred to did not happen, as a support of no move."""
    bounced: tuple[int, ...] = _NONE
    """Own moves and retreats that another unit kept out."""

    def sos_share(self, power: str) -> float:
        """Share of the sum of squared centre counts, 0 to 1; after a solo the winner has 1 and the others 0.

        The score of the public research code for games cut off before their end: it rewards leading more than
        keeping up.
        """
        own = self.centres[POWERS.index(power)]
        if self._is_won:
            return float(own >= SOLO_CENTRES)
        return own**2 / max(1, sum(count**2 for count in self.centres))

    def draw_share(self, power: str) -> float:
        """Share of a draw among those who own a centre, 0 to 1; after a solo the winner has 1 and the others 0."""
        own = self.centres[POWERS.index(power)]
        if self._is_won:
            return float(own >= SOLO_CENTRES)
        return float(own > 0) / max(1, sum(count > 0 for count in self.centres))

    def win_share(self, power: str) -> float:
        """Share of the win, 0 to 1: whoever owns most centres has won, and those who share that number share the win.

        This is what "win" means everywhere. A solo, with SOLO_CENTRES or more, is a win that nobody can share.
        """
        most = max(self.centres)
        return float(self.centres[POWERS.index(power)] == most) / self.centres.count(most)

    def solo(self, power: str) -> float:
        """1 for the power that owns SOLO_CENTRES or more, else 0."""
        return float(self.centres[POWERS.index(power)] >= SOLO_CENTRES)

    def survival(self, power: str) -> float:
        """1 while the power owns a centre, else 0."""
        return float(self.centres[POWERS.index(power)] > 0)

    def leader_gap(self, power: str) -> float:
        """0 within three centres of the leader, then down by an eighteenth a centre."""
        return -max(0, max(self.centres) - self.centres[POWERS.index(power)] - 3) / SOLO_CENTRES

    def balance(self, power: str) -> float:
        """How evenly the centres lie among those who own any, 0 to 1 (1 - deviation / mean); 0 for a leader."""
        alive = [count for count in self.centres if count]
        if not alive or self.centres[POWERS.index(power)] == max(alive):
            return 0.0
        return max(0.0, 1.0 - pstdev(alive) / fmean(alive))

    @property
    def _is_won(self) -> bool:
        return max(self.centres) >= SOLO_CENTRES


def _of(count: Callable[[Standing], tuple[int, ...]]) -> Callable[[Standing, str], float]:
    return lambda standing, power: float(count(standing)[POWERS.index(power)])


_MEASURES: dict[str, Callable[[Standing, str], float]] = {
    "centres_gained": _of(lambda standing: standing.centres),
    "sos_share": Standing.sos_share,
    "draw_share": Standing.draw_share,
    "survival": Standing.survival,
    "leader_gap": Standing.leader_gap,
    "balance": Standing.balance,
    "units_dislodged": _of(lambda standing: standing.dislodged),
    "units_driven_out": _of(lambda standing: standing.driven_out),
    "orders_void": _of(lambda standing: standing.void),
    "orders_bounced": _of(lambda standing: standing.bounced),
}

COMPONENTS = tuple(_MEASURES)
"""Reward components of a decision row, in the order of its columns."""


def standing(board: "Board", before: Standing | None = None, played: "PhaseResult | None" = None) -> Standing:
    """How the powers of `board` stand now.

    Args:
        before: how they stood before the last phase; without it the counts begin at 0 here.
        played: that phase.
    """
    if before is None or played is None:
        return Standing(centres=board.centre_counts())

    def more(counts: tuple[int, ...], powers: list[str]) -> tuple[int, ...]:
        return tuple(count + powers.count(power) for count, power in zip(counts, POWERS, strict=True)) if powers else counts

    def marked(mark: str) -> list[str]:
        return [power for unit, power in played.owners.items() if mark in played.results[unit]]

    return Standing(
        centres=board.centre_counts(),
        dislodged=more(before.dislodged, list(played.dislodged.values())),
        driven_out=more(before.driven_out, [played.owners[unit] for unit in played.dislodged]),
        void=more(before.void, marked("void")),
        bounced=more(before.bounced, marked("bounce")),
    )


def components(before: Standing, after: Standing, power: str) -> dict[str, float]:
    """What changed for `power` between two standings, one value per name of COMPONENTS."""
    return {name: measure(after, power) - measure(before, power) for name, measure in _MEASURES.items()}


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
