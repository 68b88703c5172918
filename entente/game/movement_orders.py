"""Legal movement orders of a position, assembled from tables.

`MapTables` depends on the map alone: where a unit may go, and which units it may support. `Convoys` depends on the fleets at
sea alone. The texts equal the engine's list for a movement phase (tested); their order is undefined.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Routes = Sequence[tuple[str, frozenset[str], frozenset[str]]]
"""Per destination of an army: the location, the fleets on any path to it, the fleets on every path to it."""
UnitOrders = tuple[list[str], dict[str, list[str]], list[str]]
"""Of one unit: its holds and moves; the supports it may give, per supported unit; the locations it may support into."""


class Convoys:
    """The convoys that one set of fleets allows, computed per location on first use."""

    def __init__(self, paths: Mapping[str, Mapping[str, Sequence[Collection[str]]]]) -> None:
        """`paths` is the engine's table: start -> end -> the fleets of each path."""
        self._paths = paths
        self._routes: dict[str, Routes] = {}

    def __bool__(self) -> bool:
        return bool(self._paths)

    def routes_from(self, start: str) -> Routes:
        routes = self._routes.get(start)
        if routes is None:
            ends = self._paths.get(start, {})
            routes = self._routes[start] = [
                (end, frozenset().union(*paths), frozenset(paths[0]).intersection(*paths)) for end, paths in ends.items()
            ]
        return routes


class MapTables:
    """The orders that one unit may have on one map, whatever other units there are; computed per unit on first use."""

    def __init__(self, game_map: Any) -> None:
        self._map = game_map
        self._units: dict[str, UnitOrders] = {}

    def orders_of(self, unit: str) -> UnitOrders:
        """The orders that `unit` may have; callers share the lists and must not change them."""
        orders = self._units.get(unit)
        if orders is None:
            orders = self._units[unit] = self._compute(unit)
        return orders

    def _compute(self, unit: str) -> UnitOrders:
        kind, place = unit[0], unit[2:]
        moves, supports, supportable = [f"{unit} H"], defaultdict(list), []
        for target in self._map.dest_with_coasts[place]:
            if self._map.abuts(kind, place, "-", target):
                moves.append(f"{unit} - {target}")
            if self._map.abuts(kind, place, "S", target):
                supportable.append(target)
                for other in (f"A {target}", f"F {target}"):
                    supports[other].append(f"{unit} S {other}")
                for other in self._units_in_reach(target):
                    if other[2:5] != place[:3]:
                        supports[other] += _supports_of_move(unit, other, target)
        return moves, dict(supports), supportable

    def _units_in_reach(self, target: str) -> list[str]:
        near = {coast for place in self._map.abut_list(target, incl_no_coast=True) for coast in self._map.find_coasts(place)}
        return [f"{kind} {place}" for place in near for kind in "AF" if self._map.abuts(kind, place, "-", target)]


def movement_orders(tables: MapTables, units: Sequence[str], convoys: Convoys) -> dict[str, list[str]]:
    """Legal orders of each unit, by its province; some appear twice."""
    present = set(units)
    orders: dict[str, list[str]] = {}
    supporters: dict[str, list[str]] = defaultdict(list)
    for unit in units:
        moves, supports, supportable = tables.orders_of(unit)
        own = orders[unit[2:5]] = list(moves)
        for other in supports.keys() & present:
            own += supports[other]
        for target in supportable if convoys else ():
            supporters[target].append(unit)
    for unit in units:
        if unit[0] == "A":
            _add_convoys(orders, unit, convoys.routes_from(unit[2:]), supporters)
    return orders


def _add_convoys(
    orders: dict[str, list[str]],
    army: str,
    routes: Routes,
    supporters: Mapping[str, Sequence[str]],
) -> None:
    for target, carriers, needed in routes:
        orders[army[2:5]].append(f"{army} - {target} VIA")
        for fleet in carriers:
            orders[fleet[:3]].append(f"F {fleet} C {army} - {target}")
        for unit in supporters.get(target, ()):
            # A fleet that every path needs must convoy, so it cannot support.
            if unit[2:5] != army[2:5] and unit[2:] not in needed:
                orders[unit[2:5]] += _supports_of_move(unit, army, target)


def _supports_of_move(unit: str, other: str, target: str) -> list[str]:
    order = f"{unit} S {other} - {target}"
    return [order, order.rsplit("/", 1)[0]] if "/" in target else [order]
