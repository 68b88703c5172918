"""An adjudicator for tests: the conditions of the DATC's chapter 5.B (3.0), and its rule for orders that depend on each other.

It shares nothing with the adjudicator of `entente/game`: that one narrows ranges of strengths and knows the routes of a convoy,
this one tries every result of the orders that an order depends on, and walks the map. Orders are legal texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from diplomacy import Map

from entente.game.board import POWERS, Board


@dataclass(frozen=True, slots=True)
class Order:
    """One unit's order; `other` is the supported or convoyed unit's province."""

    power: str
    unit: str
    kind: str
    target: str = ""
    other: str = ""
    via: bool = False

    @property
    def place(self) -> str:
        return self.unit[2:5]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The board after a movement phase."""

    units: dict[str, set[str]]
    retreats: dict[str, dict[str, set[str]]]
    """Dislodged units that can retreat, per power; the others are gone."""


def read(power: str, text: str) -> Order:
    kind, place, what, *rest = text.split()
    unit = f"{kind} {place}"
    if what == "-":
        return Order(power, unit, "move", rest[0], via="VIA" in rest)
    if what == "H":
        return Order(power, unit, "hold")
    target = rest[3] if len(rest) > 2 else ""
    return Order(power, unit, "support" if what == "S" else "convoy", target, rest[1][:3])


def table_of(units: Mapping[str, Sequence[str]], orders: Mapping[str, Sequence[str]]) -> "Table":
    """The table of legal orders; units without one hold."""
    given = {order.unit: order for power, own in orders.items() for order in (read(power, text) for text in own)}
    return Table([given.get(unit, Order(power, unit, "hold")) for power, own in units.items() for unit in own])


def assert_judged_alike(table: "Table", after: Board) -> None:
    """Check the board after a movement phase: its units, and where dislodged units may retreat to."""
    judged = table.verdict()
    assert {power: set(own) for power, own in after.units().items()} == judged.units
    assert {
        power: {unit: set(places) for unit, places in own.items()} for power, own in after.dislodged().items()
    } == judged.retreats


class Open(Exception):
    """The order of the unit in the province named is not resolved."""


class Table:
    """One movement phase; orders are named by their unit's province."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self.at = {order.place: order for order in orders}
        self.final: dict[str, bool] = {}
        self.assumed: dict[str, bool] = {}
        self.circles: list[set[str]] = []
        self.paradoxes: list[set[str]] = []

    # What the orders are, whatever comes of them.

    def movers_to(self, province: str) -> list[Order]:
        return [order for order in self.at.values() if order.kind == "move" and order.target[:3] == province]

    def fleets_for(self, army: Order) -> list[Order]:
        return [
            order
            for order in self.at.values()
            if order.kind == "convoy" and (order.other, order.target) == (army.place, army.target)
        ]

    def goes_by_sea(self, order: Order) -> bool:
        """An army goes by sea if it must, says so, or a fleet of its own power convoys it."""
        if order.unit[0] == "F":
            return False
        fleets = self.fleets_for(order)
        return order.via or not adjacent(order.unit, order.target) or any(fleet.power == order.power for fleet in fleets)

    def is_matched(self, support: Order) -> bool:
        other = self.at.get(support.other)
        if other is None:
            return False
        if not support.target:
            return other.kind != "move"
        return other.kind == "move" and support.target in (other.target, other.target[:3])

    def head_to_head(self, order: Order) -> Order | None:
        """The unit that moves the opposite way, if neither goes by sea."""
        other = self.at.get(order.target[:3])
        if other is None or other.kind != "move" or other.target[:3] != order.place:
            return None
        return None if self.goes_by_sea(order) or self.goes_by_sea(other) else other

    # Conditions of chapter 5.B.

    def succeeds(self, place: str) -> bool:
        order = self.at[place]
        if order.kind == "move":
            return self.move_succeeds(order)
        return self.support_succeeds(order) if order.kind == "support" else not self.is_dislodged(place)

    def move_succeeds(self, order: Order) -> bool:
        opponent = self.head_to_head(order)
        resistance = self.defend_strength(opponent) if opponent else self.hold_strength(order.target[:3])
        rivals = [self.prevent_strength(rival) for rival in self.movers_to(order.target[:3]) if rival is not order]
        return self.attack_strength(order) > max([resistance, *rivals])

    def support_succeeds(self, support: Order) -> bool:
        against = support.target[:3] if support.target else support.other
        attackers = [order for order in self.movers_to(support.place) if order.power != support.power]
        return not any(
            self.resolve(order.place) if order.place == against else self.has_path(order) for order in attackers
        ) and not self.is_dislodged(support.place)

    def is_dislodged(self, place: str) -> bool:
        return any(self.resolve(order.place) for order in self.movers_to(place))

    def has_path(self, order: Order) -> bool:
        if not self.goes_by_sea(order):
            return True
        fleets = {fleet.place for fleet in self.fleets_for(order) if self.resolve(fleet.place)}
        reached, ahead = set(), [order.place]
        while ahead:
            for sea in seas_beside(ahead.pop()) & fleets - reached:
                reached.add(sea)
                ahead.append(sea)
        return any(order.target in coasts_beside(sea) for sea in reached)

    def supports_of(self, order: Order) -> list[Order]:
        return [
            support
            for support in self.at.values()
            if support.kind == "support"
            and support.other == order.place
            and self.is_matched(support)
            and self.resolve(support.place)
        ]

    def hold_strength(self, province: str) -> int:
        order = self.at.get(province)
        if order is None:
            return 0
        if order.kind == "move":
            return 0 if self.resolve(province) else 1
        return 1 + len(self.supports_of(order))

    def defend_strength(self, order: Order) -> int:
        return 1 + len(self.supports_of(order))

    def prevent_strength(self, order: Order) -> int:
        opponent = self.head_to_head(order)
        if not self.has_path(order) or (opponent is not None and self.resolve(opponent.place)):
            return 0
        return 1 + len(self.supports_of(order))

    def attack_strength(self, order: Order) -> int:
        if not self.has_path(order):
            return 0
        there = self.at.get(order.target[:3])
        supports = self.supports_of(order)
        if there is None or (there.kind == "move" and not self.head_to_head(order) and self.resolve(there.place)):
            return 1 + len(supports)
        if there.power == order.power:
            return 0
        return 1 + sum(support.power != there.power for support in supports)

    # Orders are resolved one by one; those that depend on each other together (5.B.9).

    def resolve(self, place: str) -> bool:
        for known in (self.final, self.assumed):
            if place in known:
                return known[place]
        raise Open(place)

    def resolve_all(self) -> None:
        pending = [place for place, order in self.at.items() if order.kind != "hold"]
        while pending := [place for place in pending if place not in self.final]:
            results = {place: self.results(place) for place in pending}
            certain = {place: found.pop() for place, (found, _) in results.items() if len(found) == 1}
            self.final |= certain or self.together({place: met for place, (_, met) in results.items()})

    def results(self, place: str) -> tuple[set[bool], set[str]]:
        """The results that an order can have, and the unresolved orders that it depends on."""
        found, met, ahead = set[bool](), set[str](), [{}]
        while ahead:
            self.assumed = ahead.pop()
            try:
                found.add(self.succeeds(place))
            except Open as needed:
                met.add(str(needed))
                ahead += [self.assumed | {str(needed): result} for result in (True, False)]
        self.assumed = {}
        return found, met

    def together(self, needs: Mapping[str, set[str]]) -> dict[str, bool]:
        """The results of a smallest set of orders that depend on nothing but each other."""
        closed = {place: {place} for place in needs}
        for _ in needs:
            closed = {place: own.union(*(needs[other] for other in own)) for place, own in closed.items()}
        circle = min(closed.values(), key=len)
        solutions = self.solutions(sorted(circle), {})
        if len(solutions) == 1:
            return solutions[0]
        convoys = {place for place in circle if self.at[place].kind == "convoy"}
        (self.paradoxes if convoys else self.circles).append(circle)
        return dict.fromkeys(convoys, False) if convoys else dict.fromkeys(circle, True)

    def solutions(self, circle: Sequence[str], assumed: dict[str, bool]) -> list[dict[str, bool]]:
        """Every consistent way to resolve `circle`."""
        for place in assumed:
            self.assumed = assumed
            try:
                if self.succeeds(place) != assumed[place]:
                    return []
            except Open:
                continue
            finally:
                self.assumed = {}
        if len(assumed) == len(circle):
            return [assumed]
        ahead = circle[len(assumed)]
        return [found for result in (True, False) for found in self.solutions(circle, assumed | {ahead: result})]

    def cut_supports(self) -> set[str]:
        """The supports that are cut, without those of armies by sea, which may lack a convoy."""
        supports = [order for order in self.at.values() if order.kind == "support" and self.is_matched(order)]
        by_land = [order for order in supports if not (order.target and self.goes_by_sea(self.at[order.other]))]
        return {order.place for order in by_land if not self.final[order.place]}

    def verdict(self) -> Verdict:
        self.resolve_all()
        succeeded = self.final
        arrived = {order.target[:3]: order for place, order in self.at.items() if order.kind == "move" and succeeded[place]}
        units: dict[str, set[str]] = {power: set() for power in POWERS}
        retreats: dict[str, dict[str, set[str]]] = {power: {} for power in POWERS}
        occupied = {order.target[:3] if order.kind == "move" and succeeded[place] else place for place, order in self.at.items()}
        for place, order in self.at.items():
            moved = order.kind == "move" and succeeded[place]
            is_dislodged = not moved and place in arrived
            if is_dislodged:
                barred = (
                    occupied | self.standoffs(occupied) | (set() if self.goes_by_sea(arrived[place]) else {arrived[place].place})
                )
                places = {location for location in locations() if adjacent(order.unit, location) and location[:3] not in barred}
                if places:
                    retreats[order.power][order.unit] = places
            else:
                units[order.power].add(order.unit[:2] + order.target if moved else order.unit)
        return Verdict(units, retreats)

    def standoffs(self, occupied: set[str]) -> set[str]:
        """Provinces that stayed empty because moves bounced."""
        return {
            order.target[:3]
            for order in self.at.values()
            if order.kind == "move" and order.target[:3] not in occupied and self.prevent_strength(order) > 0
        }


@cache
def _map() -> Map:
    return Map("standard")


@cache
def locations() -> list[str]:
    return sorted({location.upper() for location in _map().locs})


@cache
def adjacent(unit: str, location: str) -> bool:
    return bool(_map().abuts(unit[0], unit[2:], "-", location))


@cache
def seas_beside(province: str) -> set[str]:
    found = {near.upper()[:3] for at in _coasts(province) for near in _map().abut_list(at, incl_no_coast=True)}
    return {near for near in found if _map().area_type(near) == "WATER"}


@cache
def coasts_beside(sea: str) -> set[str]:
    found = {near.upper()[:3] for near in _map().abut_list(sea, incl_no_coast=True)}
    return {near for near in found if _map().area_type(near) in ("COAST", "PORT")}


def _coasts(province: str) -> list[str]:
    return [location for location in locations() if location[:3] == province]
