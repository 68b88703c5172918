"""DumbBot: a player that values every place on the board and sends each unit to the best place in reach.

The idea is David Norman's, published for the DAIDE project; the implementation is new. A province is worth the strength of
the power that owns its centre; an own centre is worth the strength of the strongest power that threatens it. These values are
spread over neighbouring places, so distant centres count too. A place is worth more if more own units can help there, and less
if rival units can come. The player sees the present board only. It keeps no memory and does not search.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from entente.game.geography import geography, province
from entente.game.legal import WAIVE, LegalOrders, OrderKind
from entente.game.snapshot import POWERS

if TYPE_CHECKING:
    from entente.game.board import Board

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

_FREE = 16 + 4 * 3 + 3**2
"""Strength assigned to a centre without an owner: that of a power with three centres."""

_Place = tuple[str, str]
_Choice = tuple[float, str, str]
"""A place where a unit may be after the phase: its worth, the order that leads there, its province."""


def dumbbot(legal: LegalOrders, rng: random.Random, board: "Board") -> list[str]:
    view = board.once(_Position).view(legal.power)
    if legal.kind is OrderKind.MOVEMENT:
        return _Campaign(legal, rng, view).orders()
    if legal.kind is OrderKind.RETREAT:
        return _retreats(legal, view)
    if legal.kind is OrderKind.BUILD:
        best = [max(options, key=lambda order: view.worth(*_place(order))) for options in legal.options]
        chosen = sorted(sorted(range(len(best)), key=lambda site: -view.worth(*_place(best[site])))[: legal.picks])
        return [best[site] for site in chosen] + [WAIVE] * (legal.picks - len(chosen))
    poorest = sorted(range(len(legal.sites)), key=lambda site: view.worth(*_place(legal.sites[site])))
    return [legal.options[site][0] for site in sorted(poorest[: legal.picks])]


class _View:
    def __init__(self, worths: dict[_Place, float], here: dict[str, float], competition: dict[str, int]) -> None:
        self._worths, self._here, self.competition = worths, here, competition
        self._choices: dict[str, list[_Choice]] = {}

    def worth(self, kind: str, location: str) -> float:
        """Value of a place, with strength and competition. A place without an entry has value 0 before these."""
        worth = self._worths.get((kind, location))
        return self._here[province(location)] if worth is None else worth

    def choices(self, unit: str) -> list[_Choice]:
        choices = self._choices.get(unit)
        if choices is None:
            places = [(self.worth(kind, location), order, where) for order, kind, location, where in _places_of(unit)]
            choices = self._choices[unit] = sorted(places, key=itemgetter(0), reverse=True)
        return choices.copy()


@cache  # a map has about 120 units
def _places_of(unit: str) -> tuple[tuple[str, str, str, str], ...]:
    """Order, unit type, location and province of each place that the unit can be at without a convoy; its own place first."""
    kind, location = _place(unit)
    steps = geography().reach.get((kind, location), ())
    return (
        (f"{unit} H", kind, location, province(location)),
        *((f"{unit} - {step}", kind, step, province(step)) for step in steps),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    places: tuple[_Place, ...]
    provinces: tuple[str, ...]
    number: dict[str, int]
    province_of: np.ndarray
    """int [places]: index of the place's province."""
    near: dict[_Place, np.ndarray]
    """int [n]: indices of the provinces where a unit at the place can be after a phase."""
    centres: np.ndarray
    """int [34]: index of each centre's province."""
    centre_of: np.ndarray
    """int [places]: index in `centres` of the centre in the place's province, 34 if it has none."""


@lru_cache(maxsize=1)
def _tables() -> _Tables:
    reach, reached = geography().reach, geography().provinces
    places = tuple(sorted(reach))
    provinces = tuple(sorted({province(location) for _, location in places}))
    number = {name: index for index, name in enumerate(provinces)}
    centres = sorted(geography().centres)
    return _Tables(
        places=places,
        provinces=provinces,
        number=number,
        province_of=np.array([number[province(location)] for _, location in places]),
        near={place: np.array(sorted({number[name] for name in {province(place[1]), *reached[place]}})) for place in places},
        centres=np.array([number[name] for name in centres]),
        centre_of=np.array(
            [centres.index(name) if (name := province(location)) in centres else len(centres) for _, location in places]
        ),
    )


@lru_cache(maxsize=3)
def _blur(season: str) -> np.ndarray:
    """The matrix [places, places] of all rounds of spreading, which is linear; values before it to values after."""
    reach, places = geography().reach, _tables().places
    number = {place: index for index, place in enumerate(places)}
    step = np.eye(len(number))
    for place, locations in reach.items():
        for location in locations:
            step[number[place], number[place[0], location]] = 1.0
    step /= _SPREAD
    total, blurred = np.zeros_like(step), np.eye(len(number))
    for weight in (*_NEAR[season], *_FAR):
        total += weight * blurred
        blurred = blurred @ step
    return total


class _Position:
    """What the powers of a position share: units near each province, owners of centres. All views are computed at once."""

    def __init__(self, board: "Board") -> None:
        tables, owned = _tables(), board.centres()
        units_near = np.zeros((len(POWERS), len(tables.provinces)), np.int64)
        for power, units in enumerate(board.units().values()):
            for unit in units:
                near = tables.near.get(_place(unit))
                units_near[power, tables.number[province(unit[2:])] if near is None else near] += 1
        strength = np.array([len(own) ** 2 + 4 * len(own) + 16 for own in owned.values()])
        holder = np.full(len(tables.provinces), len(POWERS))
        for power, own in enumerate(owned.values()):
            holder[[tables.number[centre] for centre in own]] = power
        owner = holder[tables.centres]  # int [34]: index of the power, 7 for none
        threat = _most_of_others(np.where(units_near[:, tables.centres] > 0, strength[:, None], 0))
        attack = _ATTACK[board.season] * np.append(strength, _FREE)[owner]
        centres = np.where(owner == np.arange(len(POWERS))[:, None], _DEFENCE[board.season] * threat, attack)
        self._spread = _blur(board.season), np.pad(centres, ((0, 0), (0, 1))).astype(float)[:, tables.centre_of]
        self._competition = _most_of_others(units_near)
        # Products of whole numbers are exact, so only the order of the two sums for a place matters.
        self._helped, self._contested = _STRENGTH * units_near, _COMPETITION * self._competition
        self._views: dict[str, _View] = {}

    def view(self, power: str) -> _View:
        if power not in self._views:
            self._views[power] = self._make_view(POWERS.index(power))
        return self._views[power]

    def _make_view(self, power: int) -> _View:
        tables, (blur, values) = _tables(), self._spread
        helped, contested = self._helped[power], self._contested[power]
        worths = blur @ values[power] + helped[tables.province_of] - contested[tables.province_of]
        return _View(
            dict(zip(tables.places, worths.tolist(), strict=True)),
            dict(zip(tables.provinces, (helped - contested).tolist(), strict=True)),
            dict(zip(tables.provinces, self._competition[power].tolist(), strict=True)),
        )


def _most_of_others(counts: np.ndarray) -> np.ndarray:
    second, most = np.sort(counts, axis=0)[-2:]
    return np.where(counts == most, second, most)


class _Campaign:
    def __init__(self, legal: LegalOrders, rng: random.Random, view: _View) -> None:
        self._legal, self._rng, self._view = legal, rng, view
        self._home = {province(unit[2:]): site for site, unit in enumerate(legal.sites)}
        self._orders: dict[int, str] = {}
        self._taken: dict[str, int] = {}  # province -> site of the unit that will be there
        self._started: set[int] = set()

    def orders(self) -> list[str]:
        sites = range(len(self._legal.sites))
        for site in self._rng.sample(sites, len(sites)):
            self._settle(site)
        for site in sites:
            if self._orders[site].endswith(" H"):
                self._orders[site] = self._help_other(site) or self._orders[site]
        return [self._orders[site] for site in sites]

    def _settle(self, site: int) -> None:
        if site in self._started:
            return
        self._started.add(site)
        choices = self._view.choices(self._legal.sites[site])
        while choices:
            _, order, where = choices.pop(self._pick(choices))
            neighbour = self._home.get(where, site)
            if neighbour != site and neighbour not in self._started:
                self._settle(neighbour)  # its unit may leave the place
            if where not in self._taken and (neighbour == site or neighbour in self._orders):
                self._orders[site], self._taken[where] = order, site
                return
            contested = where in self._taken and self._view.competition[where] > 0
            if contested and (support := self._support(site, self._taken[where])):
                self._orders[site], self._taken[province(self._legal.sites[site][2:])] = support, site
                return
        # No place is free, so the unit holds; a unit that was to move here will bounce.
        self._orders[site] = f"{self._legal.sites[site]} H"
        self._taken.setdefault(province(self._legal.sites[site][2:]), site)

    def _pick(self, choices: Sequence[_Choice]) -> int:
        """Index of the chosen place: usually the best, sometimes the next. A smaller gap makes the next more likely."""
        at = 0
        while at + 1 < len(choices) and self._rng.random() < _ALTERNATIVE:
            here, after = choices[at][0], choices[at + 1][0]
            gap = _CLOSENESS * (here - after) / max(abs(here), 1.0)
            if self._rng.random() < gap:
                break
            at += 1
        return at

    def _support(self, site: int, friend: int) -> str | None:
        order = self._orders.get(friend)
        if order is None or friend == site:
            return None
        words = order.split()
        action = f"{words[0]} {words[1]}" if words[2] != "-" else f"{words[0]} {words[1]} - {words[3]}"
        spellings = (f"{self._legal.sites[site]} S {action}", f"{self._legal.sites[site]} S {action.split('/')[0]}")
        return next((support for support in spellings if support in self._legal.options[site]), None)

    def _help_other(self, site: int) -> str | None:
        """A support by a unit that would only hold, for the unit with most competition; None if none is legal."""
        competition = self._view.competition
        friends = [
            (competition[where], self._view.worth(self._legal.sites[friend][0], where), where)
            for where, friend in self._taken.items()
            if friend != site and competition[where] > 0
        ]
        for _, _, where in sorted(friends, reverse=True):
            if support := self._support(site, self._taken[where]):
                return support
        return None


def _retreats(legal: LegalOrders, view: _View) -> list[str]:
    orders: list[str] = []
    taken: set[str] = set()
    for options in legal.options:
        places = {order: (order[0], order.split()[3]) for order in options if " R " in order}
        free = [order for order, place in places.items() if province(place[1]) not in taken]
        if free:
            best = max(free, key=lambda order: view.worth(*places[order]))
            taken.add(province(places[best][1]))
        else:
            best = next(order for order in options if order.endswith(" D"))
        orders.append(best)
    return orders


def _place(unit: str) -> _Place:
    kind, location = unit.split()[:2]
    return kind, location
