"""One frozen position as plain data, and the names of the powers.

Owns `Snapshot` and its identity: the id is the hash of the position's canonical text, so it names the
position wherever it came from, and a damaged text is noticed. Holds no live game and never touches
`diplomacy`: `Board.snapshot` makes it and `Board.restore` plays on from it, exactly.
"""

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from telemetry.errors import DataError

POWERS = ("AUSTRIA", "ENGLAND", "FRANCE", "GERMANY", "ITALY", "RUSSIA", "TURKEY")
"""The seven powers in alphabetical order; every tuple with one entry per power follows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One frozen mid-game position, about 2 KB, taken at the start of a phase."""

    snapshot_id: str
    """16 hex digits of the hash of `position`."""
    phase: str
    """Short phase name, as "S1903M"."""
    year: int
    """Game year, from 1901."""
    season: str
    """"S", "F" or "W"."""
    phase_type: str
    """"M" movement, "R" retreats or "A" adjustments."""
    centres: tuple[int, ...]
    """Supply centres owned, one count per power of POWERS."""
    position: str
    """The whole position as canonical JSON: all that future phases depend on."""
    source: str
    """Who played up to here: "scripted:random+mover" or "policy:12"."""
    game_id: str
    """The source game; positions of one game never part between training and held-out."""
    seed: int
    """Seed of the source game's players."""


def position_id(position: str) -> str:
    """Identity of a position: 16 hex digits over its canonical text."""
    return blake2b(position.encode(), digest_size=8).hexdigest()


def snapshot_of(position: str, phase: str, *, source: str, game_id: str, seed: int) -> Snapshot:
    """A recorded position as a snapshot; `phase` is its short name, as S1903M."""
    centres = {power["name"]: len(power["centers"]) for power in json.loads(position)["powers"]}
    return Snapshot(
        snapshot_id=position_id(position),
        phase=phase,
        year=int(phase[1:-1]),
        season=phase[0],
        phase_type=phase[-1],
        centres=tuple(centres[power] for power in POWERS),
        position=position,
        source=source,
        game_id=game_id,
        seed=seed,
    )


def read_position(snapshot: Snapshot) -> dict[str, Any]:
    """The position as a dictionary.

    Raises:
        DataError: the text is not the one that the id was made from.
    """
    if position_id(snapshot.position) != snapshot.snapshot_id:
        raise DataError(
            f"Snapshot {snapshot.snapshot_id} ({snapshot.phase}) is damaged: its position hashes to "
            f"{position_id(snapshot.position)}. Build the state cache again."
        )
    return dict(json.loads(snapshot.position))


def powers_with_units(snapshot: Snapshot) -> tuple[str, ...]:
    """Powers that have a unit on the map."""
    return tuple(power["name"] for power in read_position(snapshot)["powers"] if power["units"])


def board_key(snapshot: Snapshot) -> str:
    """Identity of what stands on the board alone: phase, units, dislodged units and centres, whatever order
    they were reached in.

    Two games may reach one board by different moves; the ids then differ (the engine keeps lists in order of
    arrival), the key does not. It is what must not be shared between training and held-out positions.
    """
    position = read_position(snapshot)
    powers = [
        (power["name"], sorted(power["units"]), sorted(power["retreats"]), sorted(power["centers"]))
        for power in position["powers"]
    ]
    return position_id(json.dumps([position["map"], position["phase"], powers]))
