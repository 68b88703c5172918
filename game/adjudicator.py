"""The one place that knows the inside of `diplomacy`: a light game that copies itself, freezes and thaws.

Promises: the same legal orders and adjudication as the untouched engine (compared with it in tests over random
games), a fork or a thaw in about a tenth of a millisecond, and a game that does not grow with its history. The
package is pinned, because private names are used: another release is refused. Never `copy.deepcopy` or `pickle`
of a Game: a deep copy loses the first phase's orders, and a pickle of another map corrupts the process.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from diplomacy import Game, Message
from diplomacy.engine.power import Power
from diplomacy.utils.constants import OrderSettings
from diplomacy.utils.sorted_dict import SortedDict

from game.movement_orders import Convoys, MapTables, movement_orders
from telemetry.errors import EngineError, InputError

ENGINE_VERSION = "1.1.2"
"""The release of `diplomacy` whose inside this module knows."""

MAPS = ("standard", "standard_fleet_rome", "standard_age_of_empires", "standard_age_of_empires_2")
"""Maps of the seven powers and 34 centres whose convoy tables come with the package.

For any other map the package would compute them for minutes and write them to the user's home.
"""

CONVOY_MEMO = 256
"""Convoy tables kept per process: one per set of fleets at sea, a few tens of KB each at most."""

_convoy_tables: dict[tuple[str, frozenset[str]], tuple[Any, Any, Convoys]] = {}
_map_tables: dict[str, MapTables] = {}

# What a phase leaves behind and the next one does not read: a copy starts without it.
_PER_PHASE = ("orders", "ordered_units", "combat", "command", "result", "supports", "lost", "convoy_paths")
_HISTORIES = {
    "order_history": dict,
    "message_history": SortedDict,
    "state_history": dict,
    "result_history": dict,
}
_FRESH = {
    *_PER_PHASE,
    *_HISTORIES,
    "messages",
    "error",
    "powers",
    "renderer",
    "fixed_state",
    "_unit_owner_cache",
}


class Adjudicator(Game):
    """A Game that keeps no history, lists orders from tables, and shares the convoy tables of equal sets of fleets."""

    __slots__ = ("_standing",)

    def __init__(self, **settings: Any) -> None:
        """A game at its first phase; `settings` are the engine's."""
        self._standing: dict[str, str] | None = None
        super().__init__(**settings)

    def get_all_possible_orders(self) -> dict[str, list[str]]:
        """Legal orders per province that wants some; the engine's own list costs four times as much in a movement."""
        if self.phase_type != "M" or self.is_game_done:
            return super().get_all_possible_orders()
        units = [unit for power in self.powers.values() for unit in power.units]
        tables = _map_tables.get(self.map.name)
        if tables is None:
            tables = _map_tables[self.map.name] = MapTables(self.map)
        return movement_orders(tables, units, self._convoys()[2])

    def take_orders(self, power: str, orders: list[str]) -> int:
        """Order the units of `power`, one legal text each; returns how many the engine refused.

        A legal movement order is taken as it stands: checking it again would cost more than listing it did.
        """
        if self.phase_type != "M":
            refused = len(self.error)
            self.set_orders(power, orders, expand=False)
            return len(self.error) - refused
        owner = self.powers[power]
        for order in orders:
            kind, place, what = order.split(" ", 2)
            owner.orders[f"{kind} {place}"] = what
        if orders:
            owner.civil_disorder = 0
        owner.order_is_set = OrderSettings.ORDER_SET if owner.orders else OrderSettings.ORDER_SET_EMPTY
        return 0

    def adjudicate(self) -> dict[str, tuple[str, ...]]:
        """Play the phase with the orders set so far; results per unit, empty where it simply did as told.

        `Game.process` without the record it returns and without histories: that record costs a third of the
        whole call.
        """
        self.error = []
        self._process()
        history: Any = self.result_history
        results = history.last_value()
        history.clear()
        self.clear_orders()
        if not self.is_game_done:
            # As process() does: a power with nothing to order counts as ready.
            for power in self.powers.values():
                if not power.is_eliminated() and not self.get_orderable_locations(power.name):
                    self.set_orders(power.name, [])
                    self.set_wait(power.name, False)
        return marks_by_unit(results)

    def fork(self) -> "Adjudicator":
        """An independent copy at the start of this phase; only what no phase changes is shared."""
        twin = _blank_copy(self, _GAME_SLOTS)
        for name in _PER_PHASE:
            setattr(twin, name, {})
        for name, kind in _HISTORIES.items():
            setattr(twin, name, SortedDict(self._phase_wrapper_type, kind))
        twin.messages = SortedDict(int, Message)
        twin.error = []
        twin.renderer = twin.fixed_state = twin._standing = None
        # The cache maps units to Power objects: shared, it would name the powers of the other game.
        twin._unit_owner_cache = None
        twin.powers = {name: _copy_power(power, twin) for name, power in self.powers.items()}
        return twin

    def _resolve_moves(self) -> None:
        # Nobody moves while it is found out who will: who stands where is looked up, where the engine looks through all units.
        self._standing = standing = {}
        for power in self.powers.values():
            for unit in power.units:
                standing.setdefault(unit[2:], unit)
                standing.setdefault(unit[2:5], unit)
        try:
            super()._resolve_moves()
        finally:
            self._standing = None

    def _occupant(self, site: str, any_coast: int = 0) -> str | None:
        if self._standing is None:
            return super()._occupant(site, any_coast)
        return self._standing.get(site[:3] if any_coast else site)

    def _build_list_possible_convoys(self) -> None:
        if self.convoy_paths_possible is not None:
            return
        self.convoy_paths_possible, self.convoy_paths_dest, _ = self._convoys()

    def _convoys(self) -> tuple[Any, Any, Convoys]:
        """The engine's two convoy tables for the fleets at sea, and ours made of them."""
        fleets = [unit[2:] for power in self.powers.values() for unit in power.units if unit[0] == "F"]
        key = self.map.name, frozenset(loc for loc in fleets if self.map.area_type(loc) in ("WATER", "PORT"))
        tables = _convoy_tables.get(key)
        if tables is None:
            self.convoy_paths_possible = None
            super()._build_list_possible_convoys()
            if len(_convoy_tables) >= CONVOY_MEMO:
                del _convoy_tables[next(iter(_convoy_tables))]  # the oldest: positions of one step come together
            paths = self.convoy_paths_dest
            tables = _convoy_tables[key] = self.convoy_paths_possible, paths, Convoys(paths)
        return tables


_GAME_SLOTS = tuple(name for name in Game.__slots__ if name not in _FRESH)
_POWER_SLOTS = tuple(name for name in Power.__slots__ if name not in ("game", "retreats"))


def _blank_copy(original: Any, slots: tuple[str, ...]) -> Any:
    """A new object of the same class, its constructor not run; lists, sets and dictionaries are its own."""
    twin = object.__new__(type(original))
    for name in slots:
        value = getattr(original, name)
        setattr(twin, name, value.copy() if type(value) in (list, set) or name == "dislodged" else value)
    return twin


def _copy_power(power: Power, game: Adjudicator) -> Power:
    twin = _blank_copy(power, _POWER_SLOTS)
    twin.game = game
    twin.orders = {}
    twin.retreats = {unit: list(places) for unit, places in power.retreats.items()}
    return twin


def marks_by_unit(results: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """What came of each unit's order, in plain words; empty where it simply did as told."""
    return {unit: tuple(str(mark) for mark in marks if str(mark)) for unit, marks in results.items() if unit != "WAIVE"}


def freeze(game: Game) -> str:
    """Canonical text of the position at the start of a phase.

    Lists keep the order of arrival that the engine gave them: one board reached by other moves may differ.
    """
    position = {
        "map": game.map.name,
        "rules": game.rules,
        "phase": game.phase,
        "zobrist": game.zobrist_hash,
        "note": game.note,
        "dislodged": game.dislodged,
        "popped": game.popped,
        "powers": [
            {
                "name": power.name,
                "units": power.units,
                "retreats": power.retreats,
                "centers": power.centers,
                "homes": power.homes,
                "influence": power.influence,
                "civil_disorder": power.civil_disorder,
                "goner": power.goner,
                "order_is_set": power.order_is_set,
                "wait": power.wait,
            }
            for power in game.powers.values()
        ],
    }
    return json.dumps(position, separators=(",", ":"))


def thaw(position: dict[str, Any]) -> Adjudicator:
    """A game that plays on from a frozen position; the dictionary is taken over, not copied."""
    game = new_game(position["map"], tuple(position["rules"]))
    game.phase = position["phase"]
    game.phase_type = position["phase"].split()[-1][0]
    game.zobrist_hash = position["zobrist"]
    game.note = position["note"]
    game.dislodged = position["dislodged"]
    game.popped = position["popped"]
    if {frozen["name"] for frozen in position["powers"]} != set(game.powers):
        raise ValueError(f"the powers of map {position['map']!r} are {', '.join(game.powers)}")
    # The order of the powers is part of the position: results and captures follow it.
    game.powers = {frozen["name"]: game.powers[frozen["name"]] for frozen in position["powers"]}
    for frozen in position["powers"]:
        power = game.powers[frozen["name"]]
        power.orders, power.adjust = {}, []
        for name, value in frozen.items():
            setattr(power, name, value)
    game.build_caches()
    return game


def new_game(map_name: str, rules: tuple[str, ...] | None = None) -> Adjudicator:
    """A fresh game at its first phase (a fork of one kept per map: the constructor reads rule files).

    Raises:
        InputError: the map is not one of MAPS.
        EngineError: another release of the engine is installed than the one whose inside is known here.
    """
    check_map(map_name)
    return _template(map_name, rules).fork()


def check_map(map_name: str) -> None:
    """Refuse a map that is not of the seven powers."""
    if map_name not in MAPS:
        raise InputError(f"There is no map {map_name!r} for seven powers. Choose one of {', '.join(MAPS)}.")


@lru_cache(maxsize=8)
def _template(map_name: str, rules: tuple[str, ...] | None) -> Adjudicator:
    if (installed := version("diplomacy")) != ENGINE_VERSION:
        raise EngineError(
            f"The fast board needs diplomacy {ENGINE_VERSION}, and {installed} is installed. "
            f"Install that release, or set rollouts.board_path to plain."
        )
    return Adjudicator(map_name=map_name, **({} if rules is None else {"rules": list(rules)}))
