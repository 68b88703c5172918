"""Reads one order from tokens against the legal orders of one power.

A reading has an action, its unit, and what else the action needs. Unit types, coasts and the convoy may be missing. It matches
the one legal order that agrees with all its parts; if none or several agree, it is not legal. The grammar guesses nothing else.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from entente.game.legal import LegalOrders
from entente.players.order_words import Lexeme, Token

_INSIDE = (Token.SOFT, Token.OPEN, Token.CLOSE, Token.FILLER)
_AFTER_UNIT = (Token.JOIN, Token.SOFT, Token.OPEN, Token.CLOSE, Token.DASH)
_NEAR = 8
"""Most tokens without a meaning between two parts of an order."""


class _Unit(NamedTuple):
    kind: str
    """"A", "F", or empty if it is not written."""
    place: str
    """Location; without a coast if none is written."""


class _Reading(NamedTuple):
    action: str
    unit: _Unit
    other: _Unit | None = None
    goal: str = ""
    """Where the unit moves or retreats to, or the other unit moves to."""
    via: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    order: str | None
    end: int
    """Index of the token after it."""
    place: str
    typed: bool
    """The text names the unit's type, so it is an order even if it is not legal."""


class _Goal(NamedTuple):
    places: list[str]
    ends: list[int]
    """Index of the token after each place."""
    via: bool
    certain: bool
    """False for "BUR or PIC"."""

    @property
    def end(self) -> int:
        return self.ends[-1]


class OrderGrammar:
    def __init__(self, legal: LegalOrders) -> None:
        self._legal: dict[tuple[str, str], list[tuple[_Reading, str]]] = defaultdict(list)
        """By action and province of the ordered unit."""
        for order in (order for options in legal.options for order in options):
            reading = _legal_reading(order)
            self._legal[reading.action, reading.unit.place[:3]].append((reading, order))

    def at(self, tokens: Sequence[Lexeme], start: int, verb: str = "") -> Match | None:
        """The longest order that begins here, if any. `verb`: of a heading such as "Builds:", under which a unit alone is an
        order."""
        first = tokens[start]
        if first.kind is Token.ACTION and len(first.text) > 1:
            if first.value in ("S", "C"):
                return (unit := _unit(tokens, start + 1)) and self._helps(tokens, unit[1], first.value, unit[0])
            start, verb = start + 1, first.value
        elif first.kind is Token.ACTION and first.value in ("B", "D"):
            start, verb = start + 1, first.value
        if (read := _unit(tokens, start)) is None:
            return None
        unit, end = read
        at = _skip(tokens, end, (*_INSIDE, Token.DASH), unit.place)
        if at < len(tokens) and tokens[at].kind is Token.ACTION and tokens[at].value != "-":
            action = tokens[at].value
            return self._helps(tokens, at + 1, action, unit) if action in ("S", "C") else self._plain(action, unit, at + 1)
        if (goal := _goal(tokens, end, unit.place)) is not None:
            return self._moves(tokens, unit, goal)
        alone = end == len(tokens) or tokens[end].kind in _AFTER_UNIT or first.kind is Token.ACTION
        return self._plain(verb, unit, end) if verb in ("H", "D", "B") and alone else None

    def _plain(self, action: str, unit: _Unit, end: int) -> Match:
        return self._match(_Reading(action, unit), end)

    def _helps(self, tokens: Sequence[Lexeme], start: int, action: str, unit: _Unit) -> Match | None:
        if (read := _unit(tokens, _skip(tokens, start, (*_INSIDE, Token.ACTION)))) is None:
            return None
        other, end = read
        if (goal := _goal(tokens, end, other.place)) is not None:
            reading = _Reading(action, unit, other, goal.places[-1])
            return self._match(reading, goal.end, goal.certain and len(goal.places) == 1)
        at = _skip(tokens, end, _INSIDE)
        holds = at < len(tokens) and tokens[at].kind is Token.ACTION and tokens[at].value == "H"
        return self._match(_Reading(action, unit, other), at + 1 if holds else end) if action == "S" else None

    def _moves(self, tokens: Sequence[Lexeme], unit: _Unit, goal: _Goal) -> Match:
        """A move or retreat: to the last of several places if they are a convoy's route, else to the first."""
        readings = [_Reading("-", unit, None, place, goal.via) for place in goal.places]
        if len(readings) == 1:
            return self._match(readings[0], goal.end, goal.certain)
        route = readings[-1]._replace(via=True)
        if self._order(route) is not None and self._order(readings[0]) is None:
            return self._match(route, goal.end, goal.certain)
        ended = goal.end == len(tokens) or tokens[goal.end].kind in (Token.JOIN, Token.SOFT)
        return self._match(readings[0], goal.end if ended else goal.ends[0], not ended)

    def _match(self, reading: _Reading, end: int, certain: bool = True) -> Match:
        order = self._order(reading) if certain else None
        return Match(order=order, end=end, place=reading.unit.place[:3], typed=bool(reading.unit.kind))

    def _order(self, reading: _Reading) -> str | None:
        """The one legal order that a reading matches; an army that can only go by convoy needs no "VIA"."""
        listed = [
            (legal, order)
            for legal, order in self._legal.get((reading.action, reading.unit.place[:3]), ())
            if _units_agree(reading.unit, legal.unit)
            and _units_agree(reading.other, legal.other)
            and _places_agree(reading.goal, legal.goal)
        ]
        same_way = [order for legal, order in listed if legal.via == reading.via]
        orders = same_way or [order for _, order in listed if not reading.via]
        return orders[0] if len(orders) == 1 else None


def _legal_reading(order: str) -> _Reading:
    kind, place, action, *rest = order.split()
    unit = _Unit(kind, place)
    if action in ("S", "C"):
        return _Reading(action, unit, _Unit(rest[0], rest[1]), rest[3] if len(rest) > 2 else "")
    return _Reading("-" if action == "R" else action, unit, None, rest[0] if rest else "", rest[1:] == ["VIA"])


def _places_agree(written: str, legal: str) -> bool:
    return written == legal or (written[:3] == legal[:3] and min(len(written), len(legal)) == 3)


def _units_agree(written: _Unit | None, legal: _Unit | None) -> bool:
    if written is None or legal is None:
        return written is legal
    return written.kind in ("", legal.kind) and _places_agree(written.place, legal.place)


def _skip(tokens: Sequence[Lexeme], start: int, kinds: Sequence[Token], place: str = "") -> int:
    """Index of the next token of another kind, at most `_NEAR` ahead; also skips the unit's own place: "A PAR (Paris)"."""
    for index in range(start, min(start + _NEAR, len(tokens))):
        token = tokens[index]
        own = token.kind is Token.PLACE and token.value[:3] == place[:3]
        if not own and (token.kind not in kinds or (token.kind is Token.ACTION and token.value != "-")):
            return index
    return min(start + _NEAR, len(tokens))


def _unit(tokens: Sequence[Lexeme], start: int) -> tuple[_Unit, int] | None:
    """The unit here, and the index after it; its type may be left out."""
    kind, index = "", _skip(tokens, start, _INSIDE)
    for _ in range(2):  # "a fleet"
        if index == len(tokens) or tokens[index].kind is not Token.UNIT:
            break
        kind = tokens[index].value
        index = _skip(tokens, index + 1, (*_INSIDE, Token.DASH))
    if index == len(tokens) or tokens[index].kind is not Token.PLACE:
        return None
    after = _skip(tokens, index + 1, (Token.OPEN,))
    if (
        not kind
        and after < len(tokens)
        and tokens[after].kind is Token.UNIT
        and (len(tokens[after].text) > 1 or after > index + 1)
    ):
        return _Unit(tokens[after].value, tokens[index].value), after + 1  # "the Paris army", "PAR (A)"
    return _Unit(kind, tokens[index].value), index + 1


def _goal(tokens: Sequence[Lexeme], start: int, own: str) -> _Goal | None:
    """The places after "-" or "to", or one place alone at the end of a clause."""
    index = _skip(tokens, start, (*_INSIDE, Token.DASH, Token.ACTION), own)
    if index == len(tokens) or tokens[index].kind is not Token.PLACE:
        return None
    linked = any(token.kind in (Token.DASH, Token.ACTION) for token in tokens[start:index])
    places, ends = [tokens[index].value], [index + 1]
    while [token.kind for token in tokens[ends[-1] : ends[-1] + 2]] == [Token.DASH, Token.PLACE]:
        places.append(tokens[ends[-1] + 1].value)
        ends.append(ends[-1] + 2)
    index = ends[-1]
    if by_convoy := (after := _after_via(tokens, _skip(tokens, index, (Token.OPEN, Token.SOFT)))) is not None:
        ends[-1] = index = after
    if not (linked or by_convoy or index == len(tokens) or tokens[index].kind in (Token.JOIN, Token.SOFT)):
        return None
    either = index + 1 < len(tokens) and tokens[index].text in ("/", "OR") and tokens[index + 1].kind is Token.PLACE
    return _Goal(places, ends, by_convoy, not either)


def _after_via(tokens: Sequence[Lexeme], index: int) -> int | None:
    words = [token.value if token.kind is Token.ACTION else token.text for token in tokens[index : index + 2]]
    if index == len(tokens) or tokens[index].kind is not Token.VIA:
        return None
    return index + 2 if words[1:] == ["C"] else index + 1 if words[0] == "VIA" else None
