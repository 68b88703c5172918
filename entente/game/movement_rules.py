"""Resolves the orders of a movement phase by the rulebook of 2023 and the preferences of the DATC, version 3.0.

Strengths are those of the DATC's chapter 5. The resolver decides an order as soon as the decided orders
allow only one result. Orders that stay open depend on each other: a circle of moves, which all succeed, or a convoy paradox, in
which the convoyed armies stay and have no effect (Szykman's rule). This module knows neither boards nor `diplomacy`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

Routes = Mapping[str, Mapping[str, Sequence[set[str]]]]
"""Start and end of a convoy -> the fleets of each route that the fleets at sea allow, all of which a route needs."""
Reach = Callable[[str], Sequence[str]]
"""The locations that a unit can move to without a convoy."""
_Range = tuple[int, int]
"""Least and greatest strength, over all results of the open orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    marks: dict[str, list[str]]
    """Per unit: "bounce", "no convoy", "disrupted" (by a paradox), "void", "cut", "dislodged"; empty if its order succeeded."""
    moved: set[str]
    """Provinces of the units that moved."""
    dislodged: dict[str, str]
    """Per dislodged unit, the province that its attacker came from."""
    contested: set[str]
    """Provinces in which moves bounced: no unit may retreat there."""
    by_sea: set[str]
    """Provinces of the armies that moved by convoy: a unit that such an army dislodged may retreat there."""


def resolve(owners: Mapping[str, str], orders: Mapping[str, str], reach: Reach, routes: Routes) -> Outcome:
    """Decide a movement phase.

    Args:
        owners: unit -> its power.
        orders: unit -> its order without the unit: "H", "- BUR", "- BEL VIA", "S A PAR", "S A PAR - BUR" or "C A LON - BEL".
            A unit without an order holds.
        routes: the convoys that the present fleets at sea allow.
    """
    battle = _Battle(owners, orders, reach, routes)
    battle.decide()
    return battle.outcome(owners)


@cache  # the texts of one map
def _words(order: str) -> tuple[str, str, str, bool]:
    """Kind of an order, the province of the other unit, the location that is moved to, and whether the order says VIA."""
    words = order.split(" ")
    if words[0] == "-":
        return "-", "", words[1], words[-1] == "VIA"
    if words[0] in "SC":
        return words[0], words[2][:3], words[4] if "-" in words else "", False
    return "H", "", "", False


class _Battle:
    """The orders of one phase, keyed by province, which has one unit at most."""

    def __init__(self, owners: Mapping[str, str], orders: Mapping[str, str], reach: Reach, routes: Routes) -> None:
        self._owner = {unit[2:5]: power for unit, power in owners.items()}
        self._goals: dict[str, str] = {}
        """Province of each mover -> the province it moves to."""
        self._attackers: dict[str, list[str]] = {}
        """Province -> provinces of the units that move there."""
        self._routes: dict[str, list[set[str]]] = {}
        """Province of each convoyed army -> the routes whose fleets all convoy it."""
        self._supports: dict[str, tuple[str, str]] = {}
        """Province of each supporter -> the province of the supported unit, and the one where it is supported."""
        self._supporters: dict[str, list[str]] = {}
        """Province of a unit -> provinces of its supporters."""
        self._faults: dict[str, list[str]] = {}
        """By province: marks of the orders that have no effect whatever the open orders do."""
        self._works: dict[str, bool] = {}
        """Decided orders of movers (true: it moves) and supporters (true: it is not cut)."""
        self._stranded: set[str] = set()
        """Convoyed armies that stay because of a paradox."""
        self._asked: list[str] = []
        """Open orders that the last answers depend on."""
        self._adrift: list[str] = []
        """Armies whose convoy was open in the last answers."""
        self._read(orders, reach, routes)

    def _read(self, orders: Mapping[str, str], reach: Reach, routes: Routes) -> None:
        moves: dict[str, tuple[str, str, bool]] = {}
        supports: list[tuple[str, str, str]] = []
        convoys: dict[tuple[str, str], set[str]] = {}
        for unit, order in orders.items():
            kind, other, location, via = _words(order)
            if kind == "-":
                moves[unit[2:5]] = unit, location, via
            elif kind == "S":
                supports.append((unit[2:5], other, location))
            elif kind == "C":
                convoys.setdefault((other, location), set()).add(unit[2:5])
        for place, (unit, location, via) in moves.items():
            fleets = convoys.pop((place, location), None) if convoys else None
            if fleets or via or location not in reach(unit):
                self._read_convoy(place, location, fleets or set(), routes, via or location not in reach(unit))
            if place not in self._faults:
                self._goals[place] = location[:3]
                self._attackers.setdefault(location[:3], []).append(place)
        for fleet in (fleet for fleets in convoys.values() for fleet in fleets):
            self._faults[fleet] = ["void"]
        for place, other, location in supports:
            target = moves[other][1] if other in moves else ""
            if other in self._owner and location in (target, target[:3]) and (other not in moves or other in self._goals):
                self._supports[place] = other, location[:3] or other
                self._supporters.setdefault(other, []).append(place)
            else:
                self._faults[place] = ["void"]

    def _read_convoy(self, place: str, goal: str, fleets: set[str], routes: Routes, by_sea: bool) -> None:
        allowed = routes.get(place, {}).get(goal, ())
        # A convoy by the army's own power means that the army goes by sea, where it could also go by land.
        own = {fleet for fleet in fleets if self._owner[fleet] == self._owner[place]}
        by_sea = by_sea or any(own & route for route in allowed)
        ready = [route for route in allowed if route <= fleets] if by_sea else []
        for fleet in fleets.difference(*ready):
            self._faults[fleet] = ["no convoy", "void"]
        if ready:
            self._routes[place] = ready
        elif by_sea:
            self._faults[place] = ["no convoy"]

    def decide(self) -> None:
        pending = [*self._supports, *self._goals]
        while pending:
            still_open = []
            for place in pending:
                works = self._judge(place)
                if works is None:
                    still_open.append(place)
                else:
                    self._works[place] = works
            if len(still_open) == len(pending):
                self._decide_circle(pending)
                still_open = [place for place in pending if place not in self._works]
            pending = still_open

    def _judge(self, place: str) -> bool | None:
        """Whether the order in `place` succeeds; None while that depends on open orders."""
        return self._is_uncut(place) if place in self._supports else self._moves(place)

    def _known(self, place: str) -> bool | None:
        works = self._works.get(place)
        if works is None:
            self._asked.append(place)
        return works

    def _is_uncut(self, place: str) -> bool | None:
        target, uncut = self._supports[place][1], True
        for attacker in self._attackers.get(place, ()):
            if self._owner[attacker] == self._owner[place]:
                continue
            # An attack from the province that the support is directed at cuts it only by dislodging.
            cuts = self._known(attacker) if attacker == target else self._arrives(attacker)
            if cuts:
                return False
            uncut = None if cuts is None else uncut
        return uncut

    def _arrives(self, place: str) -> bool | None:
        """Whether the mover in `place` can get there: by land, or by a route without a dislodged fleet."""
        routes = self._routes.get(place)
        if routes is None:
            return True
        if place in self._stranded:
            return False
        states = [{self._is_dislodged(fleet) for fleet in route} for route in routes]
        if {False} in states:
            return True
        if all(True in state for state in states):
            return False
        self._adrift.append(place)
        return None

    def _is_dislodged(self, place: str) -> bool | None:
        answers = [self._known(attacker) for attacker in self._attackers.get(place, ())]
        return True if True in answers else None if None in answers else False

    def _moves(self, place: str) -> bool | None:
        goal = self._goals[place]
        arrives = self._arrives(place)
        if arrives is False:
            return False
        rivals = self._rivals(place)
        opponent = self._owner.get(goal)
        if opponent is None and not rivals:
            return arrives
        is_head_on = self._is_head_on(place, goal)
        leaves = opponent is None or (goal in self._goals and not is_head_on and self._known(goal))
        answers = set()
        if leaves is not False:
            answers.add(_wins(self._strength(place), rivals))
        if not leaves:
            attack = (0, 0) if opponent == self._owner[place] else self._strength(place, opponent)
            answers.add(_wins(attack, [*rivals, self._resistance(place)]))
        works = answers.pop() if len(answers) == 1 else None
        return None if works and arrives is None else works

    def _rivals(self, place: str) -> list[_Range]:
        goal = self._goals[place]
        return [self._prevents(rival, goal) for rival in self._attackers[goal] if rival != place]

    def _resistance(self, place: str) -> _Range:
        goal = self._goals[place]
        return self._strength(goal) if goal not in self._goals or self._is_head_on(place, goal) else (1, 1)

    def _prevents(self, rival: str, goal: str) -> _Range:
        arrives = self._arrives(rival)
        # The loser of a head-on battle has no effect on the province that the winner came from.
        beaten = self._is_head_on(rival, goal) and self._known(goal)
        if arrives is False or beaten:
            return 0, 0
        least, most = self._strength(rival)
        return (least if arrives and beaten is False else 0), most

    def _is_head_on(self, place: str, goal: str) -> bool:
        return self._goals.get(goal) == place and place not in self._routes and goal not in self._routes

    def _strength(self, place: str, opponent: str | None = None) -> _Range:
        """One plus the uncut supports of the unit in `place`, without those of `opponent`."""
        least = most = 1
        for supporter in self._supporters.get(place, ()):
            if self._owner[supporter] != opponent:
                uncut = self._known(supporter)
                least += uncut is True
                most += uncut is not False
        return least, most

    def _decide_circle(self, pending: Sequence[str]) -> None:
        """Decide a smallest set of open orders that depend on no other open order; in a paradox its convoyed armies stay."""
        asked: dict[str, list[str]] = {}
        adrift: dict[str, list[str]] = {}
        for place in pending:
            self._asked, self._adrift = asked[place], adrift[place] = [], []
            self._judge(place)
        circle = min((_reached(place, asked) for place in pending), key=len)
        results = self._results(circle, {})
        armies = {army for place in circle for army in adrift[place]}
        if armies and len(results) != 1:
            self._stranded |= armies
        else:  # of the results of a circle of moves, the one in which they succeed
            self._works |= max(results, key=lambda works: sum(works.values()))

    def _results(self, circle: Iterable[str], assumed: Mapping[str, bool]) -> list[dict[str, bool]]:
        """All consistent results of the orders in `circle` that agree with `assumed`."""
        decided, before = self._works, -1
        self._works = {**decided, **assumed}
        while len(self._works) != before:
            before = len(self._works)
            answers = {place: self._judge(place) for place in circle if place not in self._works}
            self._works |= {place: answer for place, answer in answers.items() if answer is not None}
        results = {place: self._works[place] for place in circle if place in self._works}
        is_open = next((place for place in circle if place not in results), None)
        is_consistent = is_open is not None or all(self._judge(place) == works for place, works in results.items())
        self._works = decided
        if is_open is None:
            return [results] if is_consistent else []
        return self._results(circle, results | {is_open: True}) + self._results(circle, results | {is_open: False})

    def outcome(self, units: Iterable[str]) -> Outcome:
        gone = {place for place in self._goals if self._works[place]}
        attackers = {self._goals[place]: place for place in gone if self._goals[place] not in gone}
        lost = {army for army in self._routes if not self._arrives(army)}
        idle = {
            fleet: "disrupted" if army in self._stranded else "no convoy"
            for army in lost
            for route in self._routes[army]
            for fleet in route
        }
        marks: dict[str, list[str]] = {}
        for unit in units:
            place = unit[2:5]
            if place in self._goals:
                own = [] if place in gone else ["no convoy"] if place in lost else ["bounce"]
            elif place in self._supports:
                own = self._support_marks(place, gone, lost)
            else:
                own = [idle[place]] if place in idle and place not in attackers else list(self._faults.get(place, ()))
            marks[unit] = [*own, "dislodged"] if place in attackers else own
        return Outcome(
            marks=marks,
            moved=gone,
            dislodged={unit: attackers[unit[2:5]] for unit in units if unit[2:5] in attackers},
            contested=self._contested(gone, lost),
            by_sea=gone & self._routes.keys(),
        )

    def _support_marks(self, place: str, gone: set[str], lost: set[str]) -> list[str]:
        supported, target = self._supports[place]
        if not self._works[place]:
            return ["cut"]
        if supported in lost:
            return ["no convoy"]
        if supported in self._goals and target not in gone and self._owner.get(target) == self._owner[place]:
            # A support against a unit of its own power does not count, unless it keeps a third unit out.
            others = [*self._rivals(supported), self._resistance(supported)]
            return ["void"] if self._is_head_on(supported, target) or _wins(self._strength(supported), others) else []
        return []

    def _contested(self, gone: set[str], lost: set[str]) -> set[str]:
        bounced = self._goals.keys() - gone - lost
        return {goal for place in bounced if not ((goal := self._goals[place]) in gone and self._is_head_on(place, goal))}


def _wins(attack: _Range, others: Sequence[_Range]) -> bool | None:
    if all(attack[0] > most for _, most in others):
        return True
    return False if any(attack[1] <= least for least, _ in others) else None


def _reached(place: str, asked: Mapping[str, Sequence[str]]) -> dict[str, None]:
    reached: dict[str, None] = {}
    ahead = [place]
    while ahead:
        place = ahead.pop()
        if place not in reached:
            reached[place] = None
            ahead += asked[place]
    return reached
