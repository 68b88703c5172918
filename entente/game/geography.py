"""Map tables: adjacency per unit type, supply centres, and the names of places.

Built once per process from the engine's map; all seven-power maps share them (tested). Importing does not load the engine."""

from collections.abc import Iterable, Mapping
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
    names: dict[str, str]
    """Province per name in capitals, with single spaces: long names, the engine's other spellings, and the province itself."""


@lru_cache(maxsize=1)
def geography() -> Geography:
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
        names=_names(board.aliases, locations),
    )


def _names(aliases: Mapping[str, str], locations: Iterable[str]) -> dict[str, str]:
    """The engine's names of places, without coasts and abbreviations of two letters; its "\\" stands for "of"."""
    provinces = {location: location for location in locations if "/" not in location}
    names = {name.replace("\\", "OF"): place for name, place in aliases.items() if place in provinces and len(name) > 2}
    return {name: place for name, place in names.items() if name.replace(" ", "").isalpha()} | provinces


def province(location: str) -> str:
    """The province of a location: "SPA" for "SPA/SC"."""
    return location[:3]
