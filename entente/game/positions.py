"""Positions that others wrote, as boards: the JSON of the `diplomacy` package, or units, retreats and centres by power.

Such a position holds what legal orders depend on, and every part of it is checked against the map. Whatever else a game knows is
as at its start: its boards are for asking what a power may order, not for playing on. This module reads no text of prompts and no
files.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from entente.game.adjudicator import freeze, new_game, thaw
from entente.game.board import OVER, POWERS, Board
from entente.game.geography import geography
from entente.game.recorded import check_variant, is_texts
from entente.telemetry.errors import InputError

_PHASE = re.compile(r"([SF])(\d{4})([MR])|(W)(\d{4})(A)")
_YEARS = range(1901, 2001)
_LONG = {"S": "SPRING", "F": "FALL", "W": "WINTER", "M": "MOVEMENT", "R": "RETREATS", "A": "ADJUSTMENTS"}

_KEPT = 64
"""Boards kept, each some ten KB."""
_ByPower = Mapping[str, Sequence[str]]


def board_of_game(game: Any) -> Board:
    """The last position of a game as `diplomacy.utils.export.to_saved_game_format` saves it."""
    phases = game.get("phases") if isinstance(game, Mapping) else None
    if not isinstance(phases, list) or not phases or not isinstance(phases[-1], Mapping):
        raise InputError("the game is not one as the diplomacy package saves it: it lacks phases")
    check_variant(game, "the game")
    return board_of_state(phases[-1].get("state"))


def board_of_state(state: Any) -> Board:
    """The position in a state as `diplomacy.Game.get_state` gives it: name, units, centers, and retreats.

    Raises:
        InputError: it is no such state, is on another map or under other rules, the game is over, or the board is impossible.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("name"), str):
        raise InputError("the state is not one as the diplomacy package gives it: it lacks the phase's name, such as 'S1901M'")
    check_variant(state, "the state")
    parts = {part: state.get(part) or {} for part in ("units", "retreats", "centers")}
    for part, by_power in parts.items():
        if not isinstance(by_power, Mapping):
            raise InputError(f"'{part}' in the state must map powers to lists")
        for power, listed in by_power.items():
            if power not in POWERS:
                raise InputError(f"'{part}' in the state names the power {power!r}: the powers are {', '.join(POWERS)}")
            places = [listed] if part != "retreats" else listed.values() if isinstance(listed, Mapping) else [None]
            if not all(is_texts(each) for each in places):
                raise InputError(
                    f"'{part}' of {power} in the state must be a list of texts" + " for each unit" * (part == "retreats")
                )
    retreats = {
        power: {unit[1:]: () for unit in parts["units"].get(power, ()) if unit.startswith("*")}
        | dict(parts["retreats"].get(power, {}))
        for power in POWERS
    }
    units = {power: [unit for unit in own if not unit.startswith("*")] for power, own in parts["units"].items()}
    return board_of(state["name"], units, retreats, parts["centers"])


def board_of(phase: str, units: _ByPower, retreats: Mapping[str, Mapping[str, Sequence[str]]], centres: _ByPower) -> Board:
    """The board with these parts; a power that a part leaves out has none of it.

    The powers of a position are asked one after the other, so the latest boards are kept: equal parts share one, and nobody may
    step it.

    Args:
        phase: short name, such as "S1901M".
        retreats: dislodged units, and where each may retreat to.

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
    """See `board_of`; all parts are per power of POWERS."""
    named = _PHASE.fullmatch(phase)
    if phase == OVER:
        raise InputError("the game is over: nobody has orders to give")
    if named is None or int(named[2] or named[5]) not in _YEARS:
        raise InputError(f"there is no phase {phase!r}: phases are named as 'S1901M', 'F1901R' or 'W1901A'")
    season, year, kind = (part for part in named.groups() if part is not None)
    _check_units(units)
    _check_retreats(retreats, units, phase)
    _check_centres(centres)
    position = json.loads(_start())
    position["phase"] = f"{_LONG[season]} {year} {_LONG[kind]}"
    for power in position["powers"]:
        place = POWERS.index(power["name"])
        power["units"], power["centers"] = list(units[place]), list(centres[place])
        power["retreats"] = {unit: list(places) for unit, places in retreats[place]}
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


def _check_retreats(retreats: Sequence[Sequence[tuple[str, _Texts]]], units: Sequence[_Texts], phase: str) -> None:
    occupied, reach = {unit[2:5] for own in units for unit in own}, geography().reach
    dislodged: set[str] = set()
    for power, own in zip(POWERS, retreats, strict=True):
        for unit, places in own:
            if not phase.endswith("R"):
                raise InputError(f"{power} has the dislodged unit {unit!r} in {phase}, which is no phase of retreats")
            if not _is_unit(unit):
                raise InputError(f"{power} cannot have the dislodged unit {unit!r}: units are written as 'A PAR' or 'F SPA/SC'")
            if unit[2:5] in dislodged:
                raise InputError(f"two dislodged units are in {unit[2:5]}")
            dislodged.add(unit[2:5])
            for place in places:
                if place[:3] in occupied or place not in reach[unit[0], unit[2:]] or not _is_unit(f"{unit[0]} {place}"):
                    raise InputError(f"{power}'s {unit} cannot retreat to {place!r}")


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
