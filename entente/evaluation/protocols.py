"""Protocols: named match settings (`protocols.toml`), so that results of different people are comparable.

A protocol fixes seats, start, years, measure and number of games. The user chooses players and their play settings."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from entente.evaluation.settings import MatchSettings, Measure
from entente.players.opponents import is_endpoint
from entente.telemetry.errors import InputError

_FREE = {"games", "concurrency", "seed"}
"""Settings that a user may combine with a protocol; with fewer games the table is marked as a part."""


class Protocol(BaseModel):
    """Settings of a match, without its players."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: str
    ours: Literal["one", "six", "table"]
    """Seats of the players that the user names."""
    against: str = ""
    """Player of the other seats; empty at one table."""
    any_opponent: bool = False
    """Whether `--opponents` may name another player instead."""
    years: int
    """Game years, from 1901."""
    games: int
    """For each player; a multiple of seven."""
    measure: Measure = "sos"


@cache
def protocols() -> Mapping[str, Protocol]:
    text = (Path(__file__).parent / "protocols.toml").read_text()
    return TypeAdapter(dict[str, Protocol]).validate_python(tomllib.loads(text))


def find_protocol(name: str) -> Protocol:
    if name not in protocols():
        raise InputError(f"there is no protocol '{name}': the protocols are {', '.join(protocols())}")
    return protocols()[name]


def usual_protocol(players: Sequence[str], opponents: Sequence[str], asked: Mapping[str, Any]) -> str:
    """'whole-game' if a model folder plays and the user set nothing else, else empty. See `protocol_match` for the arguments."""
    a_folder = any("/" in name and not is_endpoint(name) for name in players)
    return "whole-game" if a_folder and not opponents and not set(asked) - _FREE else ""


def protocol_match(name: str, players: Sequence[str], opponents: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the protocol's match. `opponents`: the user's `--opponents`, or empty; `asked`: match settings that the
    user set too. Raises InputError for an unknown protocol, other players than it needs, or a setting that it fixes."""
    protocol = find_protocol(name)
    wrong = ["--opponents"] if opponents and not protocol.any_opponent else []
    if taken := [f"--{each.replace('_', '-')}" for each in asked if each not in _FREE] + wrong:
        raise InputError(f"protocol '{name}' fixes what {', '.join(taken)} would set: leave out one of the two")
    if not players:
        raise InputError(f"protocol '{name}' takes players: name them, as --players models/whole-192")
    fixed = {"start": "standard", "years": protocol.years, "measure": protocol.measure}
    chosen = fixed | {"protocol": name, "games": protocol.games} | dict(asked)
    against = opponents or protocol.against
    if protocol.ours == "six":
        if len(players) != 1:
            raise InputError(f"in protocol '{name}' one player has six seats: name one player, not {len(players)}")
        return chosen | {"players": (against,), "opponents": players[0]}
    return chosen | {"players": tuple(players), "opponents": against}


def check_protocol(match: MatchSettings) -> None:
    """Raises InputError if the match names a protocol and differs from it."""
    if not match.protocol:
        return
    protocol = find_protocol(match.protocol)
    ours, against = match.players, match.opponents
    if protocol.ours == "six":
        ours, against = tuple(filter(None, (match.opponents,))), match.players[0] if match.players else ""
    for setting, value in protocol_match(match.protocol, ours, against if protocol.any_opponent else "", {}).items():
        if setting not in _FREE and (own := getattr(match, setting)) != value:
            raise InputError(f"the match names protocol '{match.protocol}', but its {setting} are not that protocol's: {own!r}")


def part_of_protocol(match: MatchSettings) -> str:
    """A sentence if the match has fewer games than its protocol; else empty."""
    from entente.evaluation.matches import DEFAULT_GAMES, GAMES_PER_ROUND, rounds_for  # loads NumPy, which help does not need

    protocol = protocols().get(match.protocol)
    games = rounds_for(match.games or DEFAULT_GAMES) * GAMES_PER_ROUND
    if protocol is None or games >= protocol.games:
        return ""
    return f"this is a part of protocol {match.protocol}: {games} of its {protocol.games} games"
