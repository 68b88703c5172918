"""Map tables for scripted players: adjacency per unit type, and supply centres.

The tables are made once per process from the engine's map. All seven-power maps share them (tested). Importing this module does
not load the engine.
"""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Geography:
    """A place is a unit type and a location: ("F", "SPA/SC") and ("A", "SPA") are two places of one province."""

    reach: dict[tuple[str, str], tuple[str, ...]]
    """Per place, the locations that the unit there can move to without a convoy, sorted."""
    provinces: dict[tuple[str, str], frozenset[str]]
    """Per place, the provinces of the locations in `reach`."""
    centres: frozenset[str]
    """Provinces with a supply centre."""


@lru_cache(maxsize=1)
def geography() -> Geography:
    """The tables; computed at the first call."""
    from entente.game.adjudicator import new_game  # imported here because it loads the engine

    board = new_game().map
    locations = sorted({location.upper() for location in board.locs})
    reach = {}
    for kind in "AF":
        for location in locations:
            if steps := tuple(other for other in locations if board.abuts(kind, location, "-", other)):
                reach[kind, location] = steps
    return Geography(
        reach=reach,
        provinces={place: frozenset(map(province, steps)) for place, steps in reach.items()},
        centres=frozenset(map(str.upper, board.scs)),
    )


def province(location: str) -> str:
    """The province of a location: "SPA" for "SPA/SC"."""
    return location[:3]
