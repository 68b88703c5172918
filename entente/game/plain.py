"""The rules engine through its public calls only: `PlainGame` by the published rules, `PackageGame` by the package's.

Only tests and benchmarks use them, as the reference for the fast path of `Board`. Both are slow: they parse orders, record whole
phases, list legal orders anew each phase, and copy a game by setting a new one to the same state.
"""

import json
from typing import Any, Self

from diplomacy import Game

from entente.game.adjudicator import freeze, marks_by_unit
from entente.game.board import Board
from entente.game.rules import MAP, RuledGame
from entente.game.snapshot import Snapshot, read_position


class PackageGame(Game):
    __slots__ = ()

    @classmethod
    def thaw(cls, position: dict[str, Any]) -> Self:
        game = cls(map_name=MAP, rules=position["rules"])
        frozen = {power["name"]: power for power in position["powers"]}

        def per_power(name: str) -> dict[str, Any]:
            return {power: parts[name] for power, parts in frozen.items()}

        units = {power: [*parts["units"], *(f"*{unit}" for unit in parts["retreats"])] for power, parts in frozen.items()}
        game.set_state(
            {
                "map": MAP,
                "note": position["note"],
                "name": game.map.phase_abbr(position["phase"]),
                "units": units,
                "retreats": per_power("retreats"),
                "centers": per_power("centers"),
                "homes": per_power("homes"),
                "influence": per_power("influence"),
                "civil_disorder": per_power("civil_disorder"),
            }
        )
        # `set_state` leaves these out. `dislodged` affects results; the flags affect only the display.
        game.dislodged, game.popped = dict(position["dislodged"]), list(position["popped"])
        for name, parts in frozen.items():
            for flag in ("goner", "order_is_set", "wait"):
                setattr(game.get_power(name), flag, parts[flag])
        return game

    def take_orders(self, power: str, orders: list[str]) -> int:
        refused = len(self.error)
        self.set_orders(power, orders)
        return len(self.error) - refused

    def adjudicate(self) -> dict[str, tuple[str, ...]]:
        self.error = []  # the engine prints what is left here; the board has counted it
        return marks_by_unit(self.process().results)

    def fork(self) -> Self:
        return self.thaw(json.loads(freeze(self)))


class PlainGame(PackageGame, RuledGame):
    __slots__ = ()


def plain_board(snapshot: Snapshot | None = None, kind: type[PackageGame] = PlainGame) -> Board:
    """A board at the snapshot, without its last orders; None: in spring 1901."""
    return Board(kind(map_name=MAP) if snapshot is None else kind.thaw(read_position(snapshot)))
