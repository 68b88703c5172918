"""The game as the engine's public calls play it: what the fast path is held against.

Promises no speed. Uses no private name of `diplomacy`: orders are parsed, whole phases are recorded, legal orders
are listed anew, and a copy is a new game that is set to the same state.
"""

import json
from typing import Any

from diplomacy import Game

from game.adjudicator import check_map, freeze, marks_by_unit


class PlainGame(Game):
    """The engine's own game under the names that a board calls."""

    __slots__ = ()

    def take_orders(self, power: str, orders: list[str]) -> int:
        """Order the units of `power`, parsed as the engine does for people; returns how many it refused."""
        refused = len(self.error)
        self.set_orders(power, orders)
        return len(self.error) - refused

    def adjudicate(self) -> dict[str, tuple[str, ...]]:
        """Play the phase; results per unit, as the fast path gives them."""
        self.error = []  # or the engine prints what it refused, which the board has counted
        return marks_by_unit(self.process().results)

    def fork(self) -> "PlainGame":
        """An independent copy at the start of this phase."""
        return thaw_plain(json.loads(freeze(self)))


def new_plain_game(map_name: str, rules: list[str] | None = None) -> PlainGame:
    """A fresh game at its first phase.

    Raises:
        InputError: the map is not one of MAPS.
    """
    check_map(map_name)
    return PlainGame(map_name=map_name, **({} if rules is None else {"rules": rules}))


def thaw_plain(position: dict[str, Any]) -> PlainGame:
    """A game that plays on from a frozen position."""
    game = new_plain_game(position["map"], position["rules"])
    frozen = {power["name"]: power for power in position["powers"]}
    if frozen.keys() != game.powers.keys():
        raise ValueError(f"the powers of map {position['map']!r} are {', '.join(game.powers)}")

    def each(name: str) -> dict[str, Any]:
        return {power: parts[name] for power, parts in frozen.items()}

    units = {power: [*parts["units"], *(f"*{unit}" for unit in parts["retreats"])] for power, parts in frozen.items()}
    game.set_state(
        {
            "map": position["map"],
            "note": position["note"],
            "name": game.map.phase_abbr(position["phase"]),
            "units": units,
            "retreats": each("retreats"),
            "centers": each("centers"),
            "homes": each("homes"),
            "influence": each("influence"),
            "civil_disorder": each("civil_disorder"),
        }
    )
    # What a state leaves out: who dislodged whom decides a result, the flags only what is shown.
    game.dislodged, game.popped = dict(position["dislodged"]), list(position["popped"])
    for name, parts in frozen.items():
        for flag in ("goner", "order_is_set", "wait"):
            setattr(game.get_power(name), flag, parts[flag])
    return game
