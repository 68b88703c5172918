"""Reads orders from a model's answer, whatever its formatting, and counts what is wrong with it.

Lines, bullets, numbers, code fences, bold type, lower case, arrows, written-out words and JSON are understood. Of two orders for
one site the last counts, because a model may change its mind on the way. Nothing is guessed for an order that is not legal.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from entente.game.legal import WAIVE, LegalOrders, OrderKind

_THOUGHT = re.compile(r"\A.*</think(?:ing)?>", re.DOTALL | re.IGNORECASE)
_FENCE = re.compile(r"^\s*```.*$", re.MULTILINE)
_MARKER = re.compile(r"^[\s>*#•·–—+-]*(?:\(?\d{1,2}[.):]|\d{1,2}\s+(?=[AF]))?[\s>*•·–—+-]*")
_COAST = re.compile(r" ?[/( ] ?([NSEW]C)\b\)?")
_WORDS = {"ARMY": "A", "FLEET": "F", "HOLD": "H", "HOLDS": "H", "SUPPORT": "S", "SUPPORTS": "S", "CONVOY": "C", "CONVOYS": "C"}
_PLACE = r"[A-Z]{3}(?:/[NSEW]C)?"
_ORDER = re.compile(rf"(?:WAIVE|[AF] {_PLACE} (?:[HDB]|[-R] {_PLACE}(?: VIA)?|[SC] [AF] {_PLACE}(?: - {_PLACE})?))(?![A-Z/]| -)")
"""An order, legal or not, at the start of a line; words may follow, but no longer name of the last place."""
_LONGEST_LINE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCounts:
    """What an endpoint was asked and how it answered. Counts add up."""

    answers: int = 0
    """Decisions that it was asked for."""
    unanswered: int = 0
    """Those without an answer in time and in the form of the API."""
    unparsable: int = 0
    """Those whose answer held no order."""
    orders: int = 0
    """Orders that these decisions needed."""
    missing: int = 0
    """Those for which no legal order was given: the unit held, was disbanded, or a build was waived."""
    illegal: int = 0
    """Orders that were given and are not legal, or are one too many."""

    def __add__(self, other: "AnswerCounts") -> "AnswerCounts":
        return AnswerCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def sentence(self) -> str:
        """The counts in words."""
        return (
            f"asked for {self.answers} decisions, of which {self.unanswered} had no answer and {self.unparsable} an answer "
            f"without an order; {self.missing} of {self.orders} orders were missing ({self.missing / max(1, self.orders):.1%}), "
            f"and {self.illegal} that were given were illegal"
        )


def read_answer(text: str, legal: LegalOrders) -> tuple[list[str], AnswerCounts]:
    """The order set in an answer, legal and complete, and the counts of this one decision."""
    given = list(_orders(text))
    site_of = {order: site for site, options in enumerate(legal.options) for order in options}
    chosen: dict[int, str] = {}
    waived = illegal = 0
    for order in given:
        if order == WAIVE and legal.kind is OrderKind.BUILD:
            waived += 1
        elif (site := site_of.get(order)) is None or (site not in chosen and len(chosen) == legal.picks):
            illegal += 1
        else:
            chosen[site] = order
    missing = max(0, legal.picks - len(chosen) - waived)
    counts = AnswerCounts(answers=1, unparsable=int(not given), orders=legal.picks, missing=missing, illegal=illegal)
    return _completed(chosen, legal), counts


def no_answer(legal: LegalOrders) -> tuple[list[str], AnswerCounts]:
    """The order set of a decision without an answer, and its counts."""
    counts = AnswerCounts(answers=1, unanswered=1, orders=legal.picks, missing=legal.picks)
    return _completed({}, legal), counts


def _completed(chosen: dict[int, str], legal: LegalOrders) -> list[str]:
    """The chosen orders by site, with what the rules add."""
    if legal.kind is OrderKind.DISBAND:  # a disband that is owed must name a unit: the first ones
        for site in range(len(legal.sites)):
            if len(chosen) < legal.picks:
                chosen.setdefault(site, legal.options[site][0])
    found = legal.completed([chosen[site] for site in sorted(chosen)])
    assert found is not None, "every disband that is owed has a unit"
    return list(found)


def _orders(text: str) -> Iterator[str]:
    """All orders in a text, in canonical spelling; what is no order is left out."""
    text = _FENCE.sub("", _THOUGHT.sub("", text)).strip()
    for part in _texts(text):
        for piece in re.split(r"[\n,;:]", part):
            if (order := _ORDER.match(_canonical(piece[:_LONGEST_LINE]))) is not None:
                yield order[0]


def _texts(text: str) -> list[str]:
    """The texts in a JSON value, or the text itself."""
    try:
        value = json.loads(text) if text[:1] in ("{", "[") else text
    except (ValueError, RecursionError):  # a broken value: its lines may still hold orders
        value = text.replace('"', "\n")
    found: list[str] = []
    waiting: list[Any] = [value]
    while waiting:
        match waiting.pop():
            case str() as leaf:
                found.append(leaf)
            case dict() as table:
                waiting += reversed(table.values())
            case list() as row:
                waiting += reversed(row)
    return found


def _canonical(piece: str) -> str:
    """A line without markers, in capitals, with single spaces and our words."""
    piece = re.sub(r"[`*_\"'\[\]{}]", "", piece).upper()
    piece = re.sub(r"\s*(?:-+>|=>|[→–—])\s*|(?<=[A-Z)]) ?- ?(?=[A-Z])", " - ", _MARKER.sub("", piece))
    words = " ".join(_WORDS.get(word, word) for word in piece.split())
    return _COAST.sub(r"/\1", words)
