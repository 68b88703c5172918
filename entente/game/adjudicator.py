"""The fast path: a game that copies itself field by field, freezes to text and restores from it.

Only this module and `entente/game/rules.py` use private names of `diplomacy`. Legal orders equal those of the unchanged engine,
and results those of `PlainGame` (tested). A copy or a restore takes about 0.1 ms. A game does not grow with its history.

Do not use `copy.deepcopy` or `pickle` on a Game: a deep copy loses the orders of the first phase, and a pickle of another map
corrupts the process.
"""

import json
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

from diplomacy import Game, Map, Message
from diplomacy.engine.power import Power
from diplomacy.utils.constants import OrderSettings
from diplomacy.utils.sorted_dict import SortedDict

from entente.game.movement_orders import Convoys, MapTables, movement_orders
from entente.game.rules import MAP, RuledGame

CONVOY_MEMO = 256
"""Convoy tables kept per process, one per set of fleets at sea; each is at most a few tens of KB."""

_convoy_tables: dict[frozenset[str], tuple[Any, Any, Convoys]] = {}

# The next phase does not read these, so a copy starts without them.
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


class Adjudicator(RuledGame):
    """A Game without history. It lists orders from tables and shares convoy tables between equal sets of fleets."""

    __slots__ = ()

    def get_all_possible_orders(self) -> dict[str, list[str]]:
        """Legal orders by province. The engine's own list takes four times as long in a movement phase."""
        if self.phase_type != "M" or self.is_game_done:
            return super().get_all_possible_orders()
        units = [unit for power in self.powers.values() for unit in power.units]
        return movement_orders(_map_tables(), units, self._convoys()[2])

    def take_orders(self, power: str, orders: list[str]) -> int:
        """Set the legal orders of `power`; returns the number that the engine refused. In a movement phase they are stored
        unparsed: checking one would cost more than listing it did."""
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
        """Play the phase; returns result marks per unit, empty for an order that succeeded. `Game.process` without histories and
        without its phase record, which costs a third of the call."""
        self.error = []
        self._resolve()
        history: Any = self.result_history
        results = history.last_value()
        history.clear()
        self.clear_orders()
        if not self.is_game_done:
            # As in Game.process: a power without orders to give counts as ready.
            for power in self.powers.values():
                if not power.is_eliminated() and not self.get_orderable_locations(power.name):
                    self.set_orders(power.name, [])
                    self.set_wait(power.name, False)
        return marks_by_unit(results)

    def fork(self) -> "Adjudicator":
        """An independent copy at the start of this phase. It shares only objects that no phase changes."""
        twin = _blank_copy(self, _GAME_SLOTS)
        for name in _PER_PHASE:
            setattr(twin, name, {})
        for name, kind in _HISTORIES.items():
            setattr(twin, name, SortedDict(self._phase_wrapper_type, kind))
        twin.messages = SortedDict(int, Message)
        twin.error = []
        twin.renderer = twin.fixed_state = None
        # The cache maps units to Power objects. If shared, it would point to the powers of the other game.
        twin._unit_owner_cache = None
        twin.powers = {name: _copy_power(power, twin) for name, power in self.powers.items()}
        return twin

    def get_current_phase(self) -> str:
        """Cached short name of the phase: the engine asks for it some ten times a phase and parses the long name each time."""
        return _short_name(self.phase)

    def _build_list_possible_convoys(self) -> None:
        if self.convoy_paths_possible is not None:
            return
        self.convoy_paths_possible, self.convoy_paths_dest, _ = self._convoys()

    def _convoys(self) -> tuple[Any, Any, Convoys]:
        fleets = [unit[2:] for power in self.powers.values() for unit in power.units if unit[0] == "F"]
        at_sea = frozenset(loc for loc in fleets if self.map.area_type(loc) in ("WATER", "PORT"))
        tables = _convoy_tables.get(at_sea)
        if tables is None:
            self.convoy_paths_possible = None
            super()._build_list_possible_convoys()
            if len(_convoy_tables) >= CONVOY_MEMO:
                del _convoy_tables[next(iter(_convoy_tables))]  # the oldest; positions of one step follow each other
            paths = self.convoy_paths_dest
            tables = _convoy_tables[at_sea] = self.convoy_paths_possible, paths, Convoys(paths)
        return tables


_GAME_SLOTS = tuple(name for name in Game.__slots__ if name not in _FRESH)
_POWER_SLOTS = tuple(name for name in Power.__slots__ if name not in ("game", "retreats"))


@cache
def _map_tables() -> MapTables:
    return MapTables(Map(MAP))


@lru_cache(maxsize=2048)  # a game of a hundred years has five hundred phases
def _short_name(phase: str) -> str:
    return Map.phase_abbr(phase)


def _blank_copy(original: Any, slots: tuple[str, ...]) -> Any:
    """A shallow copy made without the constructor; lists, sets and `dislodged` are copied too."""
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
    return {unit: tuple(str(mark) for mark in marks if str(mark)) for unit, marks in results.items() if unit != "WAIVE"}


def freeze(game: Game) -> str:
    """Canonical text of the position at a phase's start. Lists keep arrival order, so one board may have several texts."""
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
    """A game that continues from `position`, which it owns. Raises ValueError for another map or other powers."""
    if position["map"] != MAP:
        raise ValueError(f"the map is {position['map']!r}, not {MAP!r}")
    game = new_game(tuple(position["rules"]))
    game.phase = position["phase"]
    game.phase_type = position["phase"].split()[-1][0]
    game.zobrist_hash = position["zobrist"]
    game.note = position["note"]
    game.dislodged = position["dislodged"]
    game.popped = position["popped"]
    if {frozen["name"] for frozen in position["powers"]} != set(game.powers):
        raise ValueError(f"the powers are {', '.join(game.powers)}")
    # The order of the powers is part of the position, because it affects results and captures.
    game.powers = {frozen["name"]: game.powers[frozen["name"]] for frozen in position["powers"]}
    for frozen in position["powers"]:
        power = game.powers[frozen["name"]]
        power.orders, power.adjust = {}, []
        for name, value in frozen.items():
            setattr(power, name, value)
    game.build_caches()
    return game


def new_game(rules: tuple[str, ...] | None = None) -> Adjudicator:
    """A new game at its first phase, copied from a cached one because the constructor reads rule files."""
    return _template(rules).fork()


@lru_cache(maxsize=8)
def _template(rules: tuple[str, ...] | None) -> Adjudicator:
    return Adjudicator(map_name=MAP, **({} if rules is None else {"rules": list(rules)}))
