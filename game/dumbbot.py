"""DumbBot: a player that values every place on the board and sends each unit to the best place in reach.

The idea is David Norman's, published for the DAIDE project; this implementation is our own. A province is worth the strength of
the power that owns its centre; an own centre is worth the strength of the strongest power that threatens it. These values are
spread over neighbouring places, so distant centres count too. A place is worth more if more own units can help there, and less
if rival units can come. The player sees the present board only. It keeps no memory and does not search.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from game.geography import geography, province
from game.legal import WAIVE, LegalOrders, OrderKind

if TYPE_CHECKING:
    from game.board import Board

_ATTACK = {"S": 700, "F": 600, "W": 700}
_DEFENCE = {"S": 300, "F": 400, "W": 1000}
"""Weight of another power's centre and of an own centre, by season. Builds guard home centres."""
_NEAR = {"S": (0.1, 1.0), "F": (1.0, 0.1), "W": (1.0, 0.1)}
"""Weights of a place itself and of its neighbours. In autumn a unit's own place counts, in spring where it can go."""
_FAR = (0.03, 0.01, 0.006, 0.005, 0.004, 0.003, 0.002, 0.001)
"""Weights of the further rounds of spreading."""
_SPREAD = 5.0
"""Each round adds the values of a place and its neighbours and divides by this."""
_STRENGTH, _COMPETITION = 1000.0, 1000.0
"""Value per own unit that can help at a place, and cost per rival unit that can come there."""
_ALTERNATIVE = 0.5
"""Probability of considering the next best place, and again from there, so that rivals cannot predict every move."""
_CLOSENESS = 5.0
"""Scale of the gap to the next best place. A gap of 1 / _CLOSENESS of the best value is never accepted."""

_Place = tuple[str, str]


def dumbbot(legal: LegalOrders, rng: random.Random, board: "Board") -> list[str]:
    """Orders of one power by the value of places."""
    view = _value_places(legal.power, board)
    if legal.kind is OrderKind.MOVEMENT:
        return _Campaign(legal, rng, view).orders()
    if legal.kind is OrderKind.RETREAT:
        return _retreats(legal, view)
    if legal.kind is OrderKind.BUILD:
        best = [max(options, key=lambda order: view.worth(_place(order))) for options in legal.options]
        chosen = sorted(sorted(range(len(best)), key=lambda site: -view.worth(_place(best[site])))[: legal.picks])
        return [best[site] for site in chosen] + [WAIVE] * (legal.picks - len(chosen))
    poorest = sorted(range(len(legal.sites)), key=lambda site: view.worth(_place(legal.sites[site])))
    return [legal.options[site][0] for site in sorted(poorest[: legal.picks])]


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """The board as one power values it."""

    values: dict[_Place, float]
    """Value of each place after spreading."""
    strength: Counter[str]
    """Per province, own units that can be there after this phase."""
    competition: dict[str, int]
    """Per province, the most units of any one rival that can be there."""

    def worth(self, place: _Place) -> float:
        """Value of a place. A place without an entry (of a unit that cannot move) has value 0 before strength and competition."""
        where = province(place[1])
        return self.values.get(place, 0.0) + _STRENGTH * self.strength[where] - _COMPETITION * self.competition.get(where, 0)


@lru_cache(maxsize=3)
def _blur(season: str) -> tuple[dict[_Place, int], np.ndarray]:
    """Index of each place, and the matrix from values before spreading to values after it.

    Spreading is linear, so all rounds and weights form one matrix [places, places], computed once per season.
    """
    reach = geography().reach
    number = {place: index for index, place in enumerate(sorted(reach))}
    step = np.eye(len(number))
    for place, locations in reach.items():
        for location in locations:
            step[number[place], number[place[0], location]] = 1.0
    step /= _SPREAD
    total, blurred = np.zeros_like(step), np.eye(len(number))
    for weight in (*_NEAR[season], *_FAR):
        total += weight * blurred
        blurred = blurred @ step
    return number, total


def _value_places(power: str, board: "Board") -> _View:
    centres, reachable = board.centres(), geography().provinces
    power_strength = {name: len(own) ** 2 + 4 * len(own) + 16 for name, own in centres.items()}
    owner = {centre: name for name, own in centres.items() for centre in own}
    units_near: defaultdict[str, Counter[str]] = defaultdict(Counter)  # province -> power -> units that can be there
    for name, units in board.units().items():
        for unit in units:
            for where in {province(unit[2:]), *reachable.get((unit[0], unit[2:]), ())}:
                units_near[where][name] += 1
    rivals = {where: {name: count for name, count in near.items() if name != power} for where, near in units_near.items()}
    centre_values = {}
    for centre in geography().centres:
        if owner.get(centre) == power:
            threat = max((power_strength[name] for name in rivals.get(centre, ())), default=0)
            centre_values[centre] = _DEFENCE[board.season] * threat
        else:
            centre_values[centre] = _ATTACK[board.season] * power_strength.get(owner.get(centre, ""), _FREE)
    number, blur = _blur(board.season)
    values = blur @ np.array([centre_values.get(province(location), 0.0) for _, location in number])
    return _View(
        values=dict(zip(number, values.tolist(), strict=True)),
        strength=Counter({where: near[power] for where, near in units_near.items()}),
        competition={where: max(near.values(), default=0) for where, near in rivals.items()},
    )


_FREE = 16 + 4 * 3 + 3**2
"""Strength assigned to a centre without an owner: that of a power with three centres."""


class _Campaign:
    """Chooses the orders of one movement phase, one unit after another."""

    def __init__(self, legal: LegalOrders, rng: random.Random, view: _View) -> None:
        self._legal, self._rng, self._view = legal, rng, view
        self._home = {province(unit[2:]): site for site, unit in enumerate(legal.sites)}
        self._orders: dict[int, str] = {}
        self._taken: dict[str, int] = {}  # province -> site of the unit that will be there
        self._started: set[int] = set()

    def orders(self) -> list[str]:
        """One order for each site."""
        sites = range(len(self._legal.sites))
        for site in self._rng.sample(sites, len(sites)):
            self._settle(site)
        for site in sites:
            if self._orders[site].endswith(" H"):
                self._orders[site] = self._help_somebody(site) or self._orders[site]
        return [self._orders[site] for site in sites]

    def _settle(self, site: int) -> None:
        if site in self._started:
            return
        self._started.add(site)
        choices = self._choices(site)
        while choices:
            order, place = choices.pop(self._pick(choices))
            where = province(place[1])
            neighbour = self._home.get(where, site)
            if neighbour != site and neighbour not in self._started:
                self._settle(neighbour)  # its unit may leave the place
            if where not in self._taken and (neighbour == site or neighbour in self._orders):
                self._orders[site], self._taken[where] = order, site
                return
            contested = where in self._taken and self._view.competition.get(where, 0) > 0
            if contested and (support := self._support(site, self._taken[where])):
                self._orders[site], self._taken[province(self._legal.sites[site][2:])] = support, site
                return
        # No place is free, so the unit holds; a unit that was to move here will bounce.
        self._orders[site] = f"{self._legal.sites[site]} H"
        self._taken.setdefault(province(self._legal.sites[site][2:]), site)

    def _choices(self, site: int) -> list[tuple[str, _Place]]:
        """Places where the unit may be after this phase, best first, each with the order that leads there."""
        own = self._legal.sites[site]
        found = [(f"{own} H", _place(own))]
        for order in self._legal.options[site]:
            words = order.split()
            if len(words) == 4 and words[2] == "-":  # a move without a convoy; a convoyed move has five words
                found.append((order, (own[0], words[3])))
        return sorted(found, key=lambda choice: -self._view.worth(choice[1]))

    def _pick(self, choices: Sequence[tuple[str, _Place]]) -> int:
        """Index of the chosen place: usually the best, sometimes the next. A smaller gap makes the next more likely."""
        at = 0
        while at + 1 < len(choices) and self._rng.random() < _ALTERNATIVE:
            here, after = self._view.worth(choices[at][1]), self._view.worth(choices[at + 1][1])
            gap = _CLOSENESS * (here - after) / max(abs(here), 1.0)
            if self._rng.random() < gap:
                break
            at += 1
        return at

    def _support(self, site: int, friend: int) -> str | None:
        """The order of `site` that supports the order given to `friend`, if it is legal."""
        order = self._orders.get(friend)
        if order is None or friend == site:
            return None
        words = order.split()
        action = f"{words[0]} {words[1]}" if words[2] != "-" else f"{words[0]} {words[1]} - {words[3]}"
        spellings = (f"{self._legal.sites[site]} S {action}", f"{self._legal.sites[site]} S {action.split('/')[0]}")
        return next((support for support in spellings if support in self._legal.options[site]), None)

    def _help_somebody(self, site: int) -> str | None:
        """A support by a unit that would only hold, for the unit with most competition; None if none is legal."""
        friends = [
            (self._view.competition.get(where, 0), self._view.worth((self._legal.sites[friend][0], where)), where)
            for where, friend in self._taken.items()
            if friend != site and self._view.competition.get(where, 0) > 0
        ]
        for _, _, where in sorted(friends, reverse=True):
            if support := self._support(site, self._taken[where]):
                return support
        return None


def _retreats(legal: LegalOrders, view: _View) -> list[str]:
    """Each unit goes to the best place that no earlier unit goes to; two units in one place would both be lost."""
    orders: list[str] = []
    taken: set[str] = set()
    for options in legal.options:
        places = {order: (order[0], order.split()[3]) for order in options if " R " in order}
        free = [order for order, place in places.items() if province(place[1]) not in taken]
        if free:
            best = max(free, key=lambda order: view.worth(places[order]))
            taken.add(province(places[best][1]))
        else:
            best = next(order for order in options if order.endswith(" D"))
        orders.append(best)
    return orders


def _place(unit: str) -> _Place:
    """("A", "PAR") for "A PAR", or for any order of that unit."""
    kind, location = unit.split()[:2]
    return kind, location
