"""Every movement order of a position, put together from tables.

Owns what depends on the map alone (`MapTables`: where a unit may go, and whom it may help to do what) and what
depends on the fleets at sea alone (`Convoys`). Promises the very texts that the engine lists for a
movement phase (held equal in tests), in no order. Never touches a game: it is told units and convoy paths.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Ways = Sequence[tuple[str, frozenset[str], frozenset[str]]]
"""Where an army can be carried, the fleets of any path there, the fleets of every path."""


class Convoys:
    """What one set of fleets at sea can carry, worked out for a location once an army stands there."""

    def __init__(self, paths: Mapping[str, Mapping[str, Sequence[Collection[str]]]]) -> None:
        """`paths`: the engine's table, start -> end -> fleets of each path."""
        self._paths = paths
        self._ways: dict[str, Ways] = {}

    def __bool__(self) -> bool:
        """Somebody could be carried somewhere."""
        return bool(self._paths)

    def of(self, start: str) -> Ways:
        """The ways of an army at `start`; none where no fleet can take it anywhere."""
        ways = self._ways.get(start)
        if ways is None:
            ends = self._paths.get(start, {})
            ways = self._ways[start] = [
                (end, frozenset().union(*paths), frozenset(paths[0]).intersection(*paths)) for end, paths in ends.items()
            ]
        return ways


class MapTables:
    """What one unit may do on one map, whatever else stands on it; filled as units come up."""

    def __init__(self, chart: Any) -> None:
        self._map = chart
        self._units: dict[str, tuple[list[str], dict[str, list[str]], list[str]]] = {}

    def of(self, unit: str) -> tuple[list[str], dict[str, list[str]], list[str]]:
        """Its holds and moves; per other unit, the supports it may give it; the places it may support into."""
        known = self._units.get(unit)
        if known is None:
            known = self._units[unit] = self._work_out(unit)
        return known

    def _work_out(self, unit: str) -> tuple[list[str], dict[str, list[str]], list[str]]:
        kind, place = unit[0], unit[2:]
        alone, helps, supportable = [f"{unit} H"], defaultdict(list), []
        for target in self._map.dest_with_coasts[place]:
            if self._map.abuts(kind, place, "-", target):
                alone.append(f"{unit} - {target}")
            if self._map.abuts(kind, place, "S", target):
                supportable.append(target)
                for other in (f"A {target}", f"F {target}"):
                    helps[other].append(f"{unit} S {other}")
                for other in self._may_move_to(target):
                    if other[2:5] != place[:3]:
                        helps[other] += _supports_of_move(unit, other, target)
        return alone, dict(helps), supportable

    def _may_move_to(self, target: str) -> list[str]:
        near = {coast for place in self._map.abut_list(target, incl_no_coast=True) for coast in self._map.find_coasts(place)}
        return [f"{kind} {place}" for place in near for kind in "AF" if self._map.abuts(kind, place, "-", target)]


def movement_orders(tables: MapTables, units: Sequence[str], convoys: Convoys) -> dict[str, list[str]]:
    """Per province with a unit, that unit's legal orders, some of them twice."""
    standing = set(units)
    orders: dict[str, list[str]] = {}
    supporters: dict[str, list[str]] = defaultdict(list)
    for unit in units:
        alone, helps, supportable = tables.of(unit)
        own = orders[unit[2:5]] = list(alone)
        for other in helps.keys() & standing:
            own += helps[other]
        for target in supportable if convoys else ():
            supporters[target].append(unit)
    for unit in units:
        if unit[0] == "A":
            _add_convoys(orders, unit, convoys.of(unit[2:]), supporters)
    return orders


def _add_convoys(
    orders: dict[str, list[str]],
    army: str,
    ways: Ways,
    supporters: Mapping[str, Sequence[str]],
) -> None:
    """What becomes legal because fleets can carry `army`: its own moves, their convoys, and supports of them."""
    for target, carriers, needed in ways:
        orders[army[2:5]].append(f"{army} - {target} VIA")
        for fleet in carriers:
            orders[fleet[:3]].append(f"F {fleet} C {army} - {target}")
        for unit in supporters.get(target, ()):
            # A fleet without which there is no path cannot support the move as well.
            if unit[2:5] != army[2:5] and unit[2:] not in needed:
                orders[unit[2:5]] += _supports_of_move(unit, army, target)


def _supports_of_move(unit: str, other: str, target: str) -> list[str]:
    named = f"{unit} S {other} - {target}"
    return [named, named.rsplit("/", 1)[0]] if "/" in target else [named]
