"""What never changes on the board: which unit can step where, and which provinces are supply centres.

Owns the tables that players weigh a position with. One geography serves every map of seven powers (a test holds
them equal). Made once per process, from the engine's map; loading this module loads no engine.
"""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Geography:
    """Places are a kind of unit and a location: ("F", "SPA/SC") and ("A", "SPA") are two places of one province."""

    reach: dict[tuple[str, str], tuple[str, ...]]
    """Per place, the locations that the unit there can step to, sorted; convoys are no step."""
    provinces: dict[tuple[str, str], frozenset[str]]
    """Per place, the provinces that `reach` lies in."""
    centres: frozenset[str]
    """Provinces with a supply centre."""


@lru_cache(maxsize=1)
def geography() -> Geography:
    """The tables, made at the first call."""
    from game.adjudicator import new_game  # the engine: whoever only names a player need not load it

    board = new_game("standard").map
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
    """The province of a location: "SPA" of "SPA/SC"."""
    return location[:3]
