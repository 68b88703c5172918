"""A frozen position as plain data, and the names of the powers.

The id of a `Snapshot` is the hash of the position's canonical text, so equal positions have equal ids and damage shows. The hash
excludes the last orders at the end of the text: the id, and the seeds derived from it, do not depend on how a position arose.
`Board.snapshot` makes snapshots and `Board.restore` continues from them. This module does not load `diplomacy`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from entente.telemetry.errors import DataError

POWERS = ("AUSTRIA", "ENGLAND", "FRANCE", "GERMANY", "ITALY", "RUSSIA", "TURKEY")
"""The seven powers in alphabetical order. Every tuple with one entry per power has this order."""
_LAST_ORDERS = ',"last_orders":'
_PLACE = r"[A-Z]{3}(?:/[A-Z]{2})?"
_ORDER = re.compile(rf"[AF] {_PLACE} (?:H|- {_PLACE}(?: VIA)?|S [AF] {_PLACE}(?: - {_PLACE})?|C A {_PLACE} - {_PLACE})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One frozen position at the start of a phase, about 3 KB."""

    snapshot_id: str
    phase: str
    year: int
    """Game year, from 1901."""
    season: str
    """ "S" spring, "F" autumn or "W" winter."""
    phase_type: str
    """"M" movement, "R" retreats or "A" adjustments."""
    centres: tuple[int, ...]
    """Supply centres owned, int per power of POWERS."""
    position: str
    """The whole position as canonical JSON: everything that later phases depend on, and the last orders if there are any."""
    source: str
    """Who played the game up to here: "scripted:random+mover" or "policy:12"."""
    game_id: str
    """The source game. Positions of one game are all training positions or all held out."""
    seed: int
    """Seed of the players of the source game."""
    power: str = ""
    """Power that the policy played up to here, and keeps while it has units; empty: any."""

    @property
    def last_orders(self) -> dict[str, tuple[str, ...]]:
        return last_orders_in(json.loads(self.position))


def position_id(position: str) -> str:
    """Hash of a position's canonical text without the last orders, 16 hex digits."""
    return blake2b(rules_part(position).encode(), digest_size=8).hexdigest()


def rules_part(position: str) -> str:
    """The canonical text without the last orders, on which the rules do not depend."""
    rules, mark, _ = position.partition(_LAST_ORDERS)
    return rules + "}" if mark else position


def with_last_orders(position: str, orders: Mapping[str, Sequence[str]]) -> str:
    return position[:-1] + _LAST_ORDERS + json.dumps(orders, separators=(",", ":")) + "}" if orders else position


def centres_in(position: str) -> tuple[int, ...]:
    counts = {power["name"]: len(power["centers"]) for power in json.loads(position)["powers"]}
    return tuple(counts[power] for power in POWERS)


def last_orders_in(position: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """`Board.last_orders` of a frozen position; raises as `movement_orders_of` does."""
    return movement_orders_of(position.get("last_orders") or {})


def movement_orders_of(orders: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Movement orders by power, in POWERS order; checks spelling only. ValueError for an unknown power or another order."""
    if unknown := sorted(orders.keys() - set(POWERS)):
        raise ValueError(f"there is no power {unknown[0]!r}")
    if wrong := [order for own in orders.values() for order in own if not _is_movement_order(order)]:
        raise ValueError(f"{wrong[0]!r} is no movement order")
    return {power: tuple(orders[power]) for power in POWERS if power in orders}


@lru_cache(maxsize=8192)  # a restored board has some thirty, and games repeat them
def _is_movement_order(text: str) -> bool:
    return _ORDER.fullmatch(text) is not None


def make_snapshot(position: str, phase: str, *, source: str, game_id: str, seed: int, power: str = "") -> Snapshot:
    return Snapshot(
        snapshot_id=position_id(position),
        phase=phase,
        year=int(phase[1:-1]),
        season=phase[0],
        phase_type=phase[-1],
        centres=centres_in(position),
        position=position,
        source=source,
        game_id=game_id,
        seed=seed,
        power=power,
    )


def read_position(snapshot: Snapshot) -> dict[str, Any]:
    """The position as a dictionary; raises a DataError if the text does not match the snapshot's id."""
    if position_id(snapshot.position) != snapshot.snapshot_id:
        raise DataError(
            f"Snapshot {snapshot.snapshot_id} ({snapshot.phase}) is damaged: its position hashes to "
            f"{position_id(snapshot.position)}. Build the state cache again."
        )
    return dict(json.loads(snapshot.position))


def units_of_powers(snapshot: Snapshot) -> dict[str, int]:
    """Power -> units on the map, for the powers that have one, in the position's order."""
    return {power["name"]: len(power["units"]) for power in read_position(snapshot)["powers"] if power["units"]}


def board_key(snapshot: Snapshot) -> str:
    """Hash of the board alone: map, phase, units, dislodged units and centres, each sorted. Boards reached by different moves
    have different ids, but equal keys. Training and held-out positions must share no key."""
    position = read_position(snapshot)
    powers = [
        (power["name"], sorted(power["units"]), sorted(power["retreats"]), sorted(power["centers"]))
        for power in position["powers"]
    ]
    return position_id(json.dumps([position["map"], position["phase"], powers]))
