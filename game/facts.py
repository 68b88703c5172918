"""Facts of the map for one power's prompt: what is beside its units, or which of its places others can move to.

They follow from the position and the map's adjacency. Only moves without a convoy count. This module writes words;
`game.prompts` puts them into a prompt.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from game.geography import geography
from game.legal import LegalOrders, OrderKind

if TYPE_CHECKING:  # game.board loads the engine
    from game.board import Board

FREE = "FREE"
"""Stands before supply centres without an owner."""


def neighbours(legal: LegalOrders, board: "Board") -> list[list[str]]:
    """Per site, the provinces that its unit can move to, and what is there: "BUR GAS A PAR FREE SPA ITALY A PIE".

    Own units and provinces with neither a unit nor another's centre come first. FREE stands before free centres, and a power's
    name before its units and its empty centres. In a retreat the words are R and the locations open to the unit; in a build,
    the provinces that any unit built there could move to.
    """
    standing = board.once(_standing)
    found = []
    for site, options in zip(legal.sites, legal.options, strict=True):
        groups: dict[str, list[str]] = {}
        for place in _goals(legal.kind, site, options):
            holder, unit = standing.get(place[:3], ("", ""))
            groups.setdefault("" if holder == legal.power else holder, []).append(unit or place)
        words = [word for holder in sorted(groups) for word in (holder, *groups[holder]) if word]
        found.append(["R", *words] if legal.kind is OrderKind.RETREAT else words)
    return found


def threats(power: str, board: "Board") -> list[str]:
    """At most two lines: "THREATS BUD RUSSIA GAL, TRI ITALY TYR VEN" and "REACH 1 SER 2 GRE RUM".

    THREATS lists the power's centres and the provinces of its units that others' units can move to, and where these units are,
    by power. REACH lists the centres that are not its own by the number of its units that can move there.
    """
    comers, centres, units = board.once(_comers), board.centres()[power], board.units()[power]
    held = {*centres, *(unit[2:5] for unit in units)}
    entries = [" ".join((place, *words)) for place in sorted(held) if (words := _others(comers.get(place, ()), power))]
    reached = Counter(place for unit in units for place in _beside(unit) if place in geography().centres)
    by_count: dict[int, list[str]] = {}
    for centre in sorted(reached.keys() - set(centres)):
        by_count.setdefault(reached[centre], []).append(centre)
    goals = [word for count in sorted(by_count) for word in (str(count), *by_count[count])]
    return ["THREATS " + ", ".join(entries)] * bool(entries) + [" ".join(("REACH", *goals))] * bool(goals)


def _others(comers: Sequence[tuple[str, str]], power: str) -> list[str]:
    """The comers of other powers: each power's name, then its places."""
    words, last = [], power
    for other, place in comers:
        if other != power:
            words += (place,) if other == last else (other, place)
            last = other
    return words


def _goals(kind: OrderKind, site: str, options: tuple[str, ...]) -> tuple[str, ...]:
    if kind is OrderKind.RETREAT:
        return tuple(order.split(" ")[3] for order in options if " R " in order)
    if kind is OrderKind.BUILD:
        return _beside(*(order.removesuffix(" B") for order in options))
    return _beside(site)


@cache  # a map has about 120 units, and 34 centres to build in
def _beside(*units: str) -> tuple[str, ...]:
    """The provinces that one of the units can move to without a convoy, sorted."""
    provinces = geography().provinces  # a place from which no unit can move has no entry
    return tuple(sorted({place for unit in units for place in provinces.get((unit[0], unit[2:]), ())}))


def _standing(board: "Board") -> dict[str, tuple[str, str]]:
    """Per province with a unit or a centre: the power whose unit is there, and the unit; else the owner or FREE, and ''."""
    found = {centre: (FREE, "") for centre in board.free_centres()}
    found |= {centre: (power, "") for power, own in board.centres().items() for centre in own}
    return found | {unit[2:5]: (power, unit) for power, own in board.units().items() for unit in own}


def _comers(board: "Board") -> dict[str, list[tuple[str, str]]]:
    """Per province, the power and the province of each unit that can move there, power by power."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for power, own in board.units().items():
        for unit in own:
            comer = power, unit[2:5]
            for place in _beside(unit):
                found[place].append(comer)
    return found
