"""Parses a prompt of `entente.game.prompts`: the power that it asks for orders, and a board with its position.

Recognises every form of `PromptSettings`, and skips the text before the phase and what follows from the board, such as legal
orders. A retreat prompt lists the retreats of one power only; the others' dislodged units can only disband on this board.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from entente.game.board import OVER, POWERS, Board
from entente.game.legal import OrderKind
from entente.game.positions import board_of
from entente.game.prompts import ANSWER_CUE, BETWEEN_LAST_ORDERS, FREE, LAST, THOUGHT_CUE
from entente.telemetry.errors import InputError

_PHASE = re.compile(r"(?:(SPRING|FALL) (\d{4}) (MOVEMENT|RETREATS)|(WINTER) (\d{4}) (ADJUSTMENTS))")
_PLACE = r"[A-Z]{3}(?:/[A-Z]{2})?"
_UNIT = re.compile(rf"\b[AF] {_PLACE}")
_SITE = re.compile(rf"([AF] {_PLACE})(?: R\b((?: (?:{'|'.join((*POWERS, FREE))}|{_PLACE})\b)*))?")
_CUES = (ANSWER_CUE.strip(), THOUGHT_CUE.strip())
_KINDS = {kind.upper() for kind in OrderKind}
_QUOTED = 60


@dataclass(slots=True)
class _Parts:
    units: dict[str, Sequence[str]] = field(default_factory=dict)
    centres: dict[str, Sequence[str]] = field(default_factory=dict)
    retreats: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    last_orders: dict[str, Sequence[str]] = field(default_factory=dict)
    free: Sequence[str] = ()


def read_prompt(text: str) -> tuple[str, Board]:
    """The power that orders, and the board; raises an InputError if the text is no prompt or its board is impossible."""
    lines = [line.strip() for line in text.strip().splitlines()]
    if OVER in lines:
        raise InputError("the game is over: no power has orders to give")
    first = next((number for number, line in enumerate(lines) if _PHASE.fullmatch(line)), None)
    if first is None:
        raise InputError("the message has no position: no line names a phase, such as 'SPRING 1901 MOVEMENT'")
    parts = _Parts()
    for number, line in enumerate(lines[first + 1 :], start=first + 1):
        words = line.split()
        if not words:
            continue
        if words[0] in POWERS and (len(words) == 1 or _KINDS & set(words)):
            _read_own(words, lines[number + 1 :], parts)
            return words[0], _board(lines[first], words, parts)
        _read_line(line, words, parts)
    raise InputError("the message names no power to order for: its last line is such as 'FRANCE MOVEMENT', or 'FRANCE' alone")


def _read_line(line: str, words: Sequence[str], parts: _Parts) -> None:
    if words[0] in POWERS and "|" in words:
        bar = words.index("|")
        sides = words[1:bar], words[bar + 1 :]
        centres_first = bool({"A", "F"} & set(sides[1])) or (bool(sides[0]) and not {"A", "F"} & set(sides[0]))
        centres, units = sides if centres_first else sides[::-1]
        if words[0] in parts.units:
            raise InputError(f"the board has two lines of {words[0]}")
        parts.centres[words[0]], parts.units[words[0]] = centres, _units(" ".join(units), line)
    elif words[0] == FREE:
        parts.free = words[1:]
    elif words[0] == LAST:
        _read_last(words, parts)
    elif words[0] == "DISLODGED" and words[1:2] and words[1] in POWERS:
        parts.retreats[words[1]] = {unit: [] for unit in _units(" ".join(words[2:]), line)}
    else:
        raise InputError(f"the line {line[:_QUOTED]!r} is not part of a board: lines are such as 'ITALY ROM VEN | A ROM'")


def _read_last(words: Sequence[str], parts: _Parts) -> None:
    parts.last_orders["".join(words[1:2])] = " ".join(words[2:]).split(BETWEEN_LAST_ORDERS)


def _read_own(words: Sequence[str], after: Sequence[str], parts: _Parts) -> None:
    power, kind = words[0], next((word for word in words[1:] if word in _KINDS), "")
    place = words.index(kind) if kind else len(words)
    cue = next((number for number, line in enumerate(after) if line in _CUES), len(after))
    if any(after[cue + 1 :]):
        raise InputError(f"the message continues after '{after[cue]}': leave out what is not the position")
    explained = [line for line in after[:cue] if line]
    for line in explained:
        if (first := line.split())[0] == LAST:
            _read_last(first, parts)
        if first[0] in POWERS:
            raise InputError(f"the message continues after {power}'s line with {line[:_QUOTED]!r}: ask for one power at a time")
    starts = [match for line in explained if (match := _SITE.match(line))]
    sites = list(_SITE.finditer(" ".join(words[place + 1 :]))) or starts
    named = list(dict.fromkeys(match[1] for match in sites))
    if "|" in words[:place]:
        bar = words.index("|")
        parts.centres[power] = words[1:bar]
        is_apart = kind in (OrderKind.RETREAT.upper(), OrderKind.BUILD.upper())  # the sites are not the units on the board
        parts.units[power] = _units(" ".join(words[bar + 1 : place]), " ".join(words)) if is_apart else named
    if kind == OrderKind.RETREAT.upper():
        places: dict[str, list[str]] = {unit: [] for unit in named}
        for match in (*sites, *starts):
            new = [word for word in (match[2] or "").split() if word not in (*POWERS, FREE)]
            places.get(match[1], []).extend(word for word in new if word not in places.get(match[1], ()))
        parts.retreats[power] = places
    elif not kind and parts.retreats.get(power):
        raise InputError(f"{power} has dislodged units: name their retreats, as in '{power} RETREAT A PAR R BUR GAS'")


def _board(phase: str, own: Sequence[str], parts: _Parts) -> Board:
    missing = [power for power in POWERS if power not in parts.units]
    if missing:
        raise InputError(f"the board has no line of {missing[0]}: all seven powers have one, such as 'ITALY |' without anything")
    words = phase.split()
    board = board_of(f"{words[0][0]}{words[1]}{words[2][0]}", parts.units, parts.retreats, parts.centres)
    if sorted(parts.free) != sorted(board.free_centres()):
        raise InputError(
            f"the board gives {' '.join(board.free_centres()) or 'no centre'} to nobody, but its line {FREE} names "
            f"{' '.join(parts.free)[:_QUOTED] or 'none'}"
        )
    kind, legal = next((word for word in own[1:] if word in _KINDS), ""), board.legal_orders().get(own[0])
    if kind and legal is not None and kind != legal.kind.upper():
        raise InputError(f"{own[0]} is asked for a {kind.lower()}, but has to order a {legal.kind} in this position")
    return board.with_last_orders(parts.last_orders) if parts.last_orders else board


def _units(text: str, line: str) -> list[str]:
    units = _UNIT.findall(text)
    if " ".join(units) != text:
        raise InputError(f"the line {line[:_QUOTED]!r} does not name units as 'A PAR F BRE'")
    return units
