"""Builds boards from foreign positions: a state of the `diplomacy` package, or units, retreats and centres by power.

The reader drops unknown fields, empty entries, and retreats to provinces that are occupied, contested or out of reach (the
package lists forbidden ones). It refuses contradictions, such as two units in one province. Names may have any case, and coasts
of armies are dropped. The rest of the game's state is as at its start, without last orders.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from entente.game.adjudicator import freeze, new_game, thaw
from entente.game.board import OVER, POWERS, Board
from entente.game.geography import geography
from entente.game.rules import MAP
from entente.telemetry.errors import InputError

RULES = frozenset(
    {
        "ALWAYS_WAIT",
        "CD_DUMMIES",
        "DIFFERENT_ADJUDICATION",
        "IGNORE_ERRORS",
        "MULTIPLE_POWERS_PER_PLAYER",
        "NO_DEADLINE",
        "NO_DIAS",
        "NO_OBSERVATIONS",
        "NO_PRESS",
        "POWER_CHOICE",
        "PROPOSE_DIAS",
        "PUBLIC_PRESS",
        "REAL_TIME",
        "SOLITAIRE",
        "START_MASTER",
    }
)
"""Rules of the package about players, deadlines, press and adjudication. All other rules change the game itself."""

_PHASE = re.compile(r"([SF])(\d{4})([MR])|(W)(\d{4})(A)")
_MOVE = re.compile(r"(?P<unit>[AF] (?P<start>\w{3})\S*) - (?P<end>\w{3})")
_YEARS = range(1901, 2001)
_LONG = {"S": "SPRING", "F": "FALL", "W": "WINTER", "M": "MOVEMENT", "R": "RETREATS", "A": "ADJUSTMENTS"}

_KEPT = 64
_ByPower = Mapping[str, Sequence[str]]


def board_of_state(state: Any, name: Any = None, contested: Collection[str] = ()) -> Board:
    """The position in a state as `diplomacy.Game.get_state` gives it: name, units, centers, and retreats.

    Args:
        name: of the phase, for a state that may lack it.
        contested: provinces where units bounced, to which no unit may retreat; a state does not list them.

    Raises:
        InputError: it is no such state, is on another map or under other rules, the game is over, or the board is impossible.
    """
    phase = (state.get("name") or name) if isinstance(state, Mapping) else None
    if not isinstance(phase, str):
        raise InputError("the state is not in the diplomacy package's format: it lacks the phase's name, such as 'S1901M'")
    check_variant(state, "the state")
    listed, centres = (
        {power: _texts(part, power, own) for power, own in _by_power(state, part)} for part in ("units", "centers")
    )
    units = {power: [unit for unit in own if not unit.startswith("*")] for power, own in listed.items()}
    retreats: dict[str, dict[str, Sequence[str]]] = {
        power: {unit[1:]: _reach(unit[1:]) for unit in own if unit.startswith("*")} for power, own in listed.items()
    }
    for power, own in _by_power(state, "retreats") if phase.endswith("R") else ():
        retreats[power] = retreats.get(power, {}) | _retreats(power, own, units.get(power, ()))
    possible = {
        power: {unit: [place for place in places if place[:3] not in contested] for unit, places in own.items()}
        for power, own in retreats.items()
    }
    return board_of(phase, units, possible, centres)


def contested_in(phase: Any) -> set[str]:
    """Provinces in which units bounced in a phase of a saved game; empty if the phase has no results."""
    orders, results = (phase.get(part) if isinstance(phase, Mapping) else None for part in ("orders", "results"))
    if not isinstance(orders, Mapping) or not isinstance(results, Mapping):
        return set()
    moves = [move for own in orders.values() if isinstance(own, list) for order in own if (move := _MOVE.match(str(order)))]
    went = {(move["start"], move["end"]) for move in moves}
    return {
        move["end"]
        for move in moves
        if "bounce" in (marks := str(results.get(move["unit"])))
        # A unit has no effect on the province of the unit that dislodged it.
        and not ("dislodged" in marks and (move["end"], move["start"]) in went)
    }


def check_variant(named: Mapping[str, Any], what: str) -> None:
    """Raise an InputError if this program does not support the map or the rules of a game or a state."""
    rules = named.get("rules") or []
    if why := variant_refusal(named.get("map") or MAP, map(str, rules if isinstance(rules, list) else [rules])):
        raise InputError(f"{what} {why}: leave it out")


def variant_refusal(map_name: Any, rules: Iterable[str]) -> str:
    """Why no game on this map by these rules is played here, a predicate for its name; empty if it is."""
    if map_name != MAP:
        return f"is on the map {map_name!r}, and only {MAP!r} is played here"
    unknown = sorted(set(rules) - RULES)
    return f"has the rule {unknown[0]}, which is not played here" if unknown else ""


def _by_power(state: Mapping[str, Any], part: str) -> list[tuple[str, Any]]:
    by_power = state.get(part) or {}
    if not isinstance(by_power, Mapping):
        raise InputError(f"'{part}' in the state must map powers to lists")
    entries = [(str(power).upper(), own) for power, own in by_power.items() if own]
    if unknown := [power for power, _ in entries if power not in POWERS]:
        raise InputError(f"'{part}' in the state names the power {unknown[0]!r}: the powers are {', '.join(POWERS)}")
    return entries


def _texts(part: str, power: str, listed: Any) -> list[str]:
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
        raise InputError(f"'{part}' of {power} in the state must be a list of texts" + " for each unit" * (part == "retreats"))
    plain = [" ".join(text.upper().split()) for text in listed]
    return list(dict.fromkeys(text.partition("/")[0] if text.lstrip("*").startswith("A ") else text for text in plain))


def _retreats(power: str, own: Any, units: Collection[str]) -> dict[str, Sequence[str]]:
    """The retreats of a power's dislodged units in the state; the map's for a unit without a list."""
    if not isinstance(own, Mapping):
        raise InputError(f"'retreats' of {power} in the state must map its dislodged units to lists of places")
    retreats: dict[str, Sequence[str]] = {}
    for name, places in own.items():
        (unit,) = _texts("retreats", power, [name])
        if unit not in units:  # else it is left from an earlier phase
            listed = _reach(unit) if places is None else _texts("retreats", power, places)
            retreats[unit] = [place[:3] for place in listed] if unit.startswith("A ") else listed
    return retreats


def _reach(unit: str) -> Sequence[str]:
    return geography().reach.get((unit[:1], unit[2:]), ())


def board_of(phase: str, units: _ByPower, retreats: Mapping[str, Mapping[str, Sequence[str]]], centres: _ByPower) -> Board:
    """The board with these parts; a power that a part leaves out has none of it. Cached, so callers must not step it.

    Args:
        phase: short name, such as "S1901M".
        retreats: dislodged units, and where each may retreat to; impossible places are dropped.

    Raises:
        InputError: the game is over, or the board is impossible.
    """
    parts = (
        tuple(tuple(units.get(power, ())) for power in POWERS),
        tuple(tuple((unit, tuple(places)) for unit, places in retreats.get(power, {}).items()) for power in POWERS),
        tuple(tuple(centres.get(power, ())) for power in POWERS),
    )
    return _board(phase, *parts)


_Texts = tuple[str, ...]


@lru_cache(maxsize=_KEPT)
def _board(
    phase: str, units: tuple[_Texts, ...], retreats: tuple[tuple[tuple[str, _Texts], ...], ...], centres: tuple[_Texts, ...]
) -> Board:
    named = _PHASE.fullmatch(phase)
    if phase == OVER:
        raise InputError("the game is over: no power has orders to give")
    if named is None or int(named[2] or named[5]) not in _YEARS:
        raise InputError(f"there is no phase {phase!r}: phases are named as 'S1901M', 'F1901R' or 'W1901A'")
    season, year, kind = (part for part in named.groups() if part is not None)
    _check_units(units)
    _check_retreats(retreats, phase)
    _check_centres(centres)
    occupied = {unit[2:5] for own in units for unit in own}
    position = json.loads(_start())
    position["phase"] = f"{_LONG[season]} {year} {_LONG[kind]}"
    for power in position["powers"]:
        place = POWERS.index(power["name"])
        power["units"], power["centers"] = list(units[place]), list(centres[place])
        power["retreats"] = {unit: _possible(unit, places, occupied) for unit, places in retreats[place]}
        power["influence"] = [unit[2:5] for unit in units[place]]
    return Board(thaw(position))


def _check_units(units: Sequence[_Texts]) -> None:
    taken: dict[str, str] = {}
    for power, own in zip(POWERS, units, strict=True):
        for unit in own:
            if not _is_unit(unit):
                raise InputError(f"{power} cannot have the unit {unit!r}: units are written as 'A PAR', 'F BRE' or 'F SPA/SC'")
            if unit[2:5] in taken:
                raise InputError(f"two units are in {unit[2:5]}: {taken[unit[2:5]]} and {power} {unit}")
            taken[unit[2:5]] = f"{power} {unit}"


def _check_retreats(retreats: Sequence[Sequence[tuple[str, _Texts]]], phase: str) -> None:
    dislodged: set[str] = set()
    for power, own in zip(POWERS, retreats, strict=True):
        for unit, _ in own:
            if not phase.endswith("R"):
                raise InputError(f"{power} has the dislodged unit {unit!r} in {phase}, which is no phase of retreats")
            if not _is_unit(unit):
                raise InputError(f"{power} cannot have the dislodged unit {unit!r}: units are written as 'A PAR' or 'F SPA/SC'")
            if unit[2:5] in dislodged:
                raise InputError(f"two dislodged units are in {unit[2:5]}")
            dislodged.add(unit[2:5])


def _possible(unit: str, places: _Texts, occupied: Collection[str]) -> list[str]:
    reach = set(_reach(unit))
    return [place for place in places if place in reach and place[:3] not in occupied and _is_unit(f"{unit[0]} {place}")]


def _check_centres(centres: Sequence[_Texts]) -> None:
    owners: dict[str, str] = {}
    for power, own in zip(POWERS, centres, strict=True):
        for centre in own:
            if centre not in geography().centres:
                raise InputError(f"{power} cannot own {centre!r}: it is no supply centre")
            if centre in owners:
                raise InputError(f"{centre} is owned twice: by {owners[centre]} and {power}")
            owners[centre] = power


@cache
def _start() -> str:
    return freeze(new_game())


def _is_unit(unit: str) -> bool:
    return unit[1:2] == " " and (unit[0], unit[2:]) in geography().reach
