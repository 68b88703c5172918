"""Reward components of a span of play, and the horizon.

A component is the difference of a measure at two moments, so the components of consecutive spans sum to the last scores minus the
first. A run's settings weight them. Counts (dislodgements, void and bounced orders) start at the fork.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from entente.game.snapshot import POWERS
from entente.telemetry.errors import InputError

if TYPE_CHECKING:  # entente.game.board loads the engine
    from entente.game.board import Board, PhaseResult

SOLO_CENTRES = 18
"""Centres that win the game alone: more than half of 34."""

_NONE = (0,) * len(POWERS)
_PHASES_OF_A_YEAR = ("SM", "SR", "FM", "FR", "WA")


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerScores:
    """The measures of all powers at one moment, and event counts since the fork; int per power of POWERS."""

    centres: tuple[int, ...]
    dislodged: tuple[int, ...] = _NONE
    """Units of others that this power's moves dislodged."""
    driven_out: tuple[int, ...] = _NONE
    """Own units that others dislodged, whether they could retreat or not."""
    void: tuple[int, ...] = _NONE
    """Own orders without effect because what they refer to did not happen, such as a support of a move not made."""
    bounced: tuple[int, ...] = _NONE
    """Own moves and retreats that another unit prevented."""

    def sos_share(self, power: str) -> float:
        """Share of the sum of squared centre counts, 0 to 1; after a solo 1 for the winner. Published research code uses it for
        games that are cut off; it rewards a lead more than keeping up."""
        own = self.centres[POWERS.index(power)]
        if self._is_won:
            return float(own >= SOLO_CENTRES)
        return own**2 / max(1, sum(count**2 for count in self.centres))

    def draw_share(self, power: str) -> float:
        """Equal share among the powers that own a centre, 0 to 1. After a solo the winner has 1 and the others 0."""
        own = self.centres[POWERS.index(power)]
        if self._is_won:
            return float(own >= SOLO_CENTRES)
        return float(own > 0) / max(1, sum(count > 0 for count in self.centres))

    def win_share(self, power: str) -> float:
        """Share of the win, 0 to 1: the power with most centres wins, and ties share equally; a solo (SOLO_CENTRES or more)
        cannot be shared. Every "win" in this project is this measure."""
        most = max(self.centres)
        return float(self.centres[POWERS.index(power)] == most) / self.centres.count(most)

    def solo(self, power: str) -> float:
        return float(self.centres[POWERS.index(power)] >= SOLO_CENTRES)

    def survival(self, power: str) -> float:
        return float(self.centres[POWERS.index(power)] > 0)

    def leader_gap(self, power: str) -> float:
        """0 within three centres of the leader, then minus 1/18 for each further centre."""
        return -max(0, max(self.centres) - self.centres[POWERS.index(power)] - 3) / SOLO_CENTRES

    def balance(self, power: str) -> float:
        """Evenness of centre counts among the powers that own any, 0 to 1: 1 - deviation / mean. It is 0 for the leader."""
        alive = [count for count in self.centres if count]
        if not alive or self.centres[POWERS.index(power)] == max(alive):
            return 0.0
        return max(0.0, 1.0 - pstdev(alive) / fmean(alive))

    @property
    def _is_won(self) -> bool:
        return max(self.centres) >= SOLO_CENTRES


def _own(counts: Callable[[PowerScores], Sequence[float]]) -> Callable[[PowerScores, str], float]:
    return lambda power_scores, power: float(counts(power_scores)[POWERS.index(power)])


_MEASURES: dict[str, Callable[[PowerScores, str], float]] = {
    "centres_gained": _own(lambda power_scores: power_scores.centres),
    "sos_share": PowerScores.sos_share,
    "draw_share": PowerScores.draw_share,
    "survival": PowerScores.survival,
    "leader_gap": PowerScores.leader_gap,
    "balance": PowerScores.balance,
    "units_dislodged": _own(lambda power_scores: power_scores.dislodged),
    "units_driven_out": _own(lambda power_scores: power_scores.driven_out),
    "orders_void": _own(lambda power_scores: power_scores.void),
    "orders_bounced": _own(lambda power_scores: power_scores.bounced),
}


def compute_power_scores(board: "Board", before: PowerScores | None = None, played: "PhaseResult | None" = None) -> PowerScores:
    """The scores now; counts continue from `before`, the scores before the phase `played`, or else start at 0."""
    if before is None or played is None:
        return PowerScores(centres=board.centre_counts())

    def add(counts: tuple[int, ...], powers: list[str]) -> tuple[int, ...]:
        return tuple(count + powers.count(power) for count, power in zip(counts, POWERS, strict=True)) if powers else counts

    def owners_of_units_marked(mark: str) -> list[str]:
        return [power for unit, power in played.owners.items() if mark in played.results[unit]]

    return PowerScores(
        centres=board.centre_counts(),
        dislodged=add(before.dislodged, list(played.dislodged.values())),
        driven_out=add(before.driven_out, [played.owners[unit] for unit in played.dislodged]),
        void=add(before.void, owners_of_units_marked("void")),
        bounced=add(before.bounced, owners_of_units_marked("bounce")),
    )


def components(before: PowerScores, after: PowerScores, power: str) -> dict[str, float]:
    return {name: measure(after, power) - measure(before, power) for name, measure in _MEASURES.items()}


def horizon_reached(start_phase: str, phase: str, years: int) -> bool:
    """True if centres were counted `years` times (at autumn's end) between the phases, or the game is over: 2 years from "S1903M"
    or "F1903M" end at "W1904A", because that winter changes no measure. Raises InputError for an invalid phase name."""
    return phase == "COMPLETED" or _next_count(phase) - _next_count(start_phase) >= years


def _next_count(phase: str) -> int:
    if phase[:1] + phase[-1:] not in _PHASES_OF_A_YEAR or not phase[1:-1].isdigit():
        raise InputError(f"{phase!r} is not the name of a phase such as 'S1903M' or 'W1905A'.")
    return int(phase[1:-1]) + (phase[0] == "W")
