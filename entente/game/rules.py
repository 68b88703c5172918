"""The package's game by the published rules: results of moves, retreats, and owed disbands.

docs/decisions.md lists the differences. Overrides private methods of `diplomacy`, so it requires one release."""

from collections import defaultdict, deque
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.metadata import version
from typing import Any

from diplomacy import Game, Map
from diplomacy.utils.order_results import BOUNCE, CUT, DISLODGED, DISRUPTED, NO_CONVOY, VOID

from entente.game.movement_rules import resolve
from entente.telemetry.errors import EngineError

ENGINE_VERSION = "1.1.2"

MAP = "standard"

_RESULTS = {str(result): result for result in (BOUNCE, CUT, DISLODGED, DISRUPTED, NO_CONVOY, VOID)}


class RuledGame(Game):
    __slots__ = ()

    def __init__(self, **settings: Any) -> None:
        """Raises an EngineError if the installed release of the engine is not ENGINE_VERSION."""
        if (installed := version("diplomacy")) != ENGINE_VERSION:
            raise EngineError(f"The rules need diplomacy {ENGINE_VERSION}, and {installed} is installed. Install that release.")
        super().__init__(**settings)

    def _move_results(self) -> list[str]:
        powers = self.powers.values()
        owners = {unit: power.name for power in powers for unit in power.units}
        orders = {unit: order for power in powers for unit, order in power.orders.items() if owners.get(unit) == power.name}
        self._build_list_possible_convoys()
        outcome = resolve(owners, orders, _steps, self.convoy_paths_dest or {})
        self.result = {unit: [_RESULTS[mark] for mark in marks] for unit, marks in outcome.marks.items()}
        self.dislodged, self.popped = outcome.dislodged, []
        moved = {unit: unit[:2] + orders[unit].split(" ")[1] for unit in owners if unit[2:5] in outcome.moved}
        closed = outcome.contested | {moved.get(unit, unit)[2:5] for unit in owners if unit not in outcome.dislodged}
        for power in powers:
            for unit in power.units:
                if unit in outcome.dislodged:
                    self._dislodge(power, unit, closed, outcome.by_sea)
            self._move(power, moved)
        self._post_move_update()
        return []

    def _dislodge(self, power: Any, unit: str, closed: set[str], by_sea: set[str]) -> None:
        """Record the retreats of a dislodged unit; without any it is destroyed."""
        origin = self.dislodged[unit]
        barred = closed if origin in by_sea else closed | {origin}
        places = [place for place in _steps(unit) if place[:3] not in barred]
        if places:
            power.retreats[unit] = places
            self.update_hash(power.name, unit_type=unit[0], loc=unit[2:], is_dislodged=True)
        else:
            self.popped.append(unit)

    def _move(self, power: Any, moved: Mapping[str, str]) -> None:
        left = [unit for unit in power.units if unit in moved or unit in self.dislodged]
        arrived = [moved[unit] for unit in left if unit in moved]
        for unit in (*left, *arrived):
            self.update_hash(power.name, unit_type=unit[0], loc=unit[2:])
        power.units = [unit for unit in power.units if unit not in left] + arrived
        entered = {location[2:5] for location in moved.values()}
        power.influence = [held for held in power.influence if held[:3] not in entered] + [unit[2:5] for unit in arrived]

    def _other_results(self) -> list[str]:
        if self.phase_type == "A":
            for power in self.powers.values():
                power.adjust += self._owed_disbands(power)
        lines = super()._other_results()
        # The package notes the coast that a fleet retreated to as if it were a province.
        coasts = {held[:3] for power in self.powers.values() for held in power.influence if "/" in held}
        for power in self.powers.values() if coasts else ():
            power.influence = [held[:3] for held in power.influence if "/" in held or held not in coasts]
        return lines

    def _owed_disbands(self, power: Any) -> list[str]:
        """Orders for owed disbands that `power` did not order: the units farthest from its centres over land and sea, fleets
        before armies, then by province name."""
        ordered = {order[:-2] for order in power.adjust if order.endswith(" D") and order[:-2] in power.units}
        owed = len(power.units) - len(power.centers) - len(ordered)
        if owed <= 0:
            return []
        distances = _distances(frozenset(power.centers))
        left = sorted(
            (unit for unit in power.units if unit not in ordered),
            key=lambda unit: (-distances.get(unit[2:5], 0), unit[0] == "A", _names()[unit[2:5]]),
        )
        return [f"{unit} D" for unit in left[:owed]]


@cache  # the units of one map
def _steps(unit: str) -> tuple[str, ...]:
    """The locations that `unit` can move or retreat to without a convoy, in the package's order."""
    map_, kind, site = Map(MAP), unit[0], unit[2:]
    near = [place.upper() for place in map_.loc_abut.get(site) or map_.loc_abut[site.lower()]]
    places = [place if kind == "F" else place[:3] for place in near]
    return tuple(dict.fromkeys(place for place in places if map_.abuts(kind, site, "-", place)))


@lru_cache(maxsize=1024)
def _distances(centres: frozenset[str]) -> dict[str, int]:
    distances = dict.fromkeys(centres, 0)
    ahead = deque(sorted(centres))
    while ahead:
        place = ahead.popleft()
        for near in _neighbours()[place] - distances.keys():
            distances[near] = distances[place] + 1
            ahead.append(near)
    return distances


@cache
def _neighbours() -> dict[str, set[str]]:
    map_ = Map(MAP)
    adjacent: dict[str, set[str]] = defaultdict(set)
    for location, near in map_.loc_abut.items():
        adjacent[location[:3].upper()] |= {place[:3].upper() for place in near if map_.area_type(place) != "SHUT"}
    return adjacent


@cache
def _names() -> dict[str, str]:
    return {short: name for name, short in Map(MAP).loc_name.items()}
