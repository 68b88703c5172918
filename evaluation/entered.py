"""The table of games that were played on servers of others: one player's measures against each opponent that it met there."""

from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.intervals import Estimate, estimate
from evaluation.match_table import MEASURES
from evaluation.settings import MatchSettings
from game.scores import Standing

_START = Standing(centres=(3, 3, 3, 3, 3, 4, 3))
_SETTINGS = MatchSettings()
ALL = "everybody"
"""The row over all games."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnteredSeat:
    """One seat of the player at the end of one game."""

    game: str
    power: str
    opponents: tuple[str, ...]
    """Who played the other powers, each once; the player's own other seats are not among them."""
    centres: tuple[int, ...]
    """Supply centres at the end, int per power of POWERS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnteredRow:
    """The player's seats in games that an opponent sat in."""

    opponent: str
    games: int
    measures: dict[str, Estimate]
    """By the names of `MEASURES`; seats of one game form one cluster."""


def entered_table(seats: Sequence[EnteredSeat]) -> list[EnteredRow]:
    """A row over all games, then one for each opponent, those met most often first. Empty without seats."""
    met = sorted({name for seat in seats for name in seat.opponents})
    rows = [_row(name, [seat for seat in seats if name in seat.opponents]) for name in met]
    ranked = sorted(rows, key=lambda row: (-row.games, row.opponent))
    return [_row(ALL, seats), *ranked] if seats else []


def _row(opponent: str, seats: Sequence[EnteredSeat]) -> EnteredRow:
    clusters = [seat.game for seat in seats]
    measures = {}
    for name, (_, share, measure) in MEASURES.items():
        values = [measure(_START, Standing(centres=seat.centres), seat.power) for seat in seats]
        measures[name] = estimate(values, clusters, _SETTINGS.bootstrap, _SETTINGS.seed, share=share)
    return EnteredRow(opponent=opponent, games=len(set(clusters)), measures=measures)
