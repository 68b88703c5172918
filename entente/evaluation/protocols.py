"""Protocols: named settings of matches, so that figures of different people answer one question.

They are data (`protocols.toml`). A protocol fixes seats, start, years and measure, and how many games make it whole. Players and
how they play stay free.
"""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from entente.evaluation.settings import MatchSettings, Measure
from entente.players.opponents import is_endpoint
from entente.telemetry.errors import InputError

_FREE = {"games", "at_once", "seed"}
"""Settings that may be given beside a protocol; with fewer games the table says that it is a part."""


class Protocol(BaseModel):
    """Settings of a match, without its players."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    about: str
    """What it asks, for the help."""
    ours: Literal["one", "six", "table"]
    """Where the players that a user names sit."""
    against: str = ""
    """Who has the other seats; empty at one table."""
    years: int
    """Game years, from 1901."""
    games: int
    """Games of the whole protocol for each player: a multiple of seven."""
    measure: Measure = "sos"

    def fixed(self) -> dict[str, Any]:
        """The settings that are the same for all players."""
        return {"start": "standard", "years": self.years, "measure": self.measure}


@cache
def protocols() -> Mapping[str, Protocol]:
    """All protocols by name, in the order of the file."""
    text = (Path(__file__).parent / "protocols.toml").read_text()
    return TypeAdapter(dict[str, Protocol]).validate_python(tomllib.loads(text))


def find_protocol(name: str) -> Protocol:
    """The protocol `name`."""
    if name not in protocols():
        raise InputError(f"there is no protocol '{name}': the protocols are {', '.join(protocols())}")
    return protocols()[name]


def usual_protocol(players: Sequence[str], opponents: Sequence[str], asked: Mapping[str, Any]) -> str:
    """The protocol of a match for which none was named: 'whole-game' where the folder of a model plays and nothing else is asked;
    else none. See `protocol_match` for the arguments."""
    a_folder = any("/" in name and not is_endpoint(name) for name in players)
    return "whole-game" if a_folder and not opponents and not set(asked) - _FREE else ""


def protocol_match(name: str, players: Sequence[str], opponents: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the protocol's match between `players`.

    Args:
        opponents: named by the user beside the protocol; empty: none.
        asked: settings of a match that the user gave beside the protocol.

    Raises:
        InputError: there is no such protocol, it takes other players, or something is given that it fixes.
    """
    protocol = find_protocol(name)
    if taken := [f"--{each.replace('_', '-')}" for each in asked if each not in _FREE] + ["--opponents"] * bool(opponents):
        raise InputError(f"protocol '{name}' fixes what {', '.join(taken)} would set: leave out one of the two")
    if not players:
        raise InputError(f"protocol '{name}' takes players: name them, as --players models/small")
    found = protocol.fixed() | {"protocol": name, "games": protocol.games} | dict(asked)
    if protocol.ours == "six":
        if len(players) != 1:
            raise InputError(f"in protocol '{name}' one player has six seats: name one player, not {len(players)}")
        return found | {"players": (protocol.against,), "opponents": players[0]}
    return found | {"players": tuple(players), "opponents": protocol.against}


def check_protocol(match: MatchSettings) -> None:
    """Check that a match has the settings of the protocol that it names, if it names one."""
    if not match.protocol:
        return
    protocol = find_protocol(match.protocol)
    wanted = protocol.fixed() | {
        "players": (protocol.against,) if protocol.ours == "six" else match.players,
        "opponents": match.opponents if protocol.ours == "six" else protocol.against,
    }
    for setting, value in wanted.items():
        if (found := getattr(match, setting)) != value:
            raise InputError(f"the match names protocol '{match.protocol}', but its {setting} are not that protocol's: {found!r}")


def part_of_protocol(match: MatchSettings) -> str:
    """A sentence if the match has fewer games than its protocol; else empty."""
    protocol = protocols().get(match.protocol)
    if protocol is None or match.games >= protocol.games:
        return ""
    return f"this is a part of protocol {match.protocol}: {match.games} of its {protocol.games} games"
