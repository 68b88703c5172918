"""The table of opponents, and the random choice of players from it.

A table is a text such as `dumbbot*3,territorial,v0,league*2`: names with weights, 1 by default. A name is a scripted player, a
published version (`v12`), an endpoint (`openai:model@http://host:port/v1`) or `league`, past versions of the run, which
`entente/rollouts/league.py` fills in before a start group is played. Scripted players and versions may search (`dumbbot+search`).
"""

import math
import re
from collections.abc import Mapping, Sequence

from entente.game.scripted import SEARCHES
from entente.players.seeds import seeded_rng

POLICY = "policy"
"""Seat of a power that the trained policy plays; its decisions are recorded. Other seats name a decider or a scripted player."""
LEAGUE = "league"
_VERSION = re.compile(r"v(\d+)")
_ENDPOINT = "openai:"

OpponentTable = tuple[tuple[str, float], ...]
"""(name, weight above 0) pairs, in the order of the text."""


def read_table(text: str) -> OpponentTable:
    """The table that `text` describes, without weights of 0; raises a ValueError for an empty table or a wrong weight."""
    table: list[tuple[str, float]] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, star, weight = (piece.strip() for piece in part.partition("*"))
        try:
            number = float(weight) if star else 1.0
        except ValueError:
            number = math.nan
        if name == LEAGUE + SEARCHES:
            raise ValueError(f"rollouts.opponents {text!r}: members of the league do not search: name a version, as 'v0+search'")
        if not name or not 0 <= number < math.inf:
            raise ValueError(f"rollouts.opponents {text!r}: '{part}' is not a name and a weight: write it as 'mover*2'")
        table.append((name, number))
    if not table:
        raise ValueError(f"rollouts.opponents {text!r} has no name: give one player, or several with commas")
    if not any(weight for _, weight in table):
        raise ValueError(f"rollouts.opponents {text!r}: the weights sum to 0: raise one of them")
    return tuple((name, weight) for name, weight in table if weight)


def table_text(table: Sequence[tuple[str, float]]) -> str:
    return ",".join(name if weight == 1 else f"{name}*{weight!r}" for name, weight in table)


def version_of(name: str) -> int | None:
    """The policy version of a name: 12 for "v12" and "v12+search"; None for other players."""
    match = _VERSION.fullmatch(name.removesuffix(SEARCHES))
    return int(match[1]) if match else None


def is_endpoint(name: str) -> bool:
    return name.startswith(_ENDPOINT) and "@" in name


def seat_name(name: str) -> str:
    """A table's player in seats and rows: "policy:12" for "v12", "policy:12+search" for "v12+search"; others keep their names."""
    version = version_of(name)
    return name if version is None else f"{POLICY}:{version}{SEARCHES if name.endswith(SEARCHES) else ''}"


def seat_version(seat: str) -> int | None:
    """The inverse of `seat_name` for versions: 12 for "policy:12"; None for other seats, also for a version that searches."""
    owner, _, number = seat.partition(":")
    return int(number) if owner == POLICY and number.isdecimal() else None


def sample_opponents(shared: str, table: OpponentTable, powers: Sequence[str], *, by_seat: bool = False) -> dict[str, str]:
    """The seat of each of `powers`: one random choice for all, or with `by_seat` one each. Depends only on `shared`, the start
    group's name, and with `by_seat` on the power."""
    if by_seat:
        return {power: _sample(table, shared, "opponents", power) for power in powers}
    return dict.fromkeys(powers, _sample(table, shared, "opponents"))


def _sample(table: OpponentTable, *named: str) -> str:
    names, weights = zip(*table, strict=True)
    if len(names) == 1:
        return seat_name(names[0])
    rng = seeded_rng(*named)
    # Equal weights keep the random choices of runs from before tables had weights.
    return seat_name(rng.choice(names) if len(set(weights)) == 1 else rng.choices(names, weights)[0])


def opponents_text(seats: Mapping[str, str], *, by_seat: bool) -> str:
    """The text in a row's `opponents`: the one player, or with `by_seat` the player of each power, `AUSTRIA=mover,...`."""
    if by_seat:
        return ",".join(f"{power}={seat}" for power, seat in seats.items())
    return next(iter(seats.values()))


def read_opponents(text: str, powers: Sequence[str]) -> dict[str, str]:
    """Power -> seat from a row's `opponents`; `powers`: those of the opponents."""
    if "=" not in text:
        return dict.fromkeys(powers, text)
    seats = dict(part.split("=", 1) for part in text.split(","))
    return {power: seats[power] for power in powers}
