"""Finds the orders in a text and sorts them by how they are written.

An order at the beginning of a clause counts as chosen; the rest of the clause is a remark. Orders within a sentence count as
mentioned, those below a heading such as "rejected" as rejected. Takes time linear in the text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from entente.game.legal import WAIVE, LegalOrders, OrderKind
from entente.players.order_grammar import Match, OrderGrammar
from entente.players.order_words import Lexeme, Token, lines_of

_REJECTING = re.compile(
    r"ALTERNATIVE(LY|S)?|AVOID(ING)?|BACKUPS?|BAD|CANDIDATES?|CONDITIONAL(LY)?|CONSIDER(ED|ING)?|CONTINGEN(T|CY|CIES)|COULD"
    r"|DISCARD(ED|ING)?|DISMISS(ED|ING)?|EXAMPLES?|EXPECT(ED|ING)?|FALLBACKS?|FUTURE|HYPOTHETICAL(LY)?|IDEAS?|IF|ILLEGAL|INSTEAD"
    r"|INVALID|LATER|MIGHT|NEVER|NEXT|NOT|.*N'T|OPTIONS?|OTHER|OTHERWISE|OVER|PREDICT.*|PREVIOUS(LY)?|RATHER|REJECT(ED|ING|S)?|RISKY"
    r"|RULED|THOUGHTS?|TEMPTING|UNUSED|WITHOUT|WOULD|WRONG|ANALYSIS|EXPLANATION|RATIONALE|REASON(S|ING)?|THINKING"
)
_REASON = re.compile(r"ANALYSIS|EXPLANATION|RATIONALE|REASON(S|ING)?|THINKING|THOUGHTS?")
_REFUSING = re.compile(r"AVOID(ING)?|DISCARD(ED|ING)?|DISMISS(ED|ING)?|ILLEGAL|INVALID|NEVER|REJECT(ED|ING|S)?|RULED|WRONG")
_GIVING = re.compile(r"AFTER|ANSWER|BEST|BETTER|CHOICE|CHOOSE|CHOSEN|DECI(DED|SION)|FINAL(LY)?|HENCE|SO|SUBMIT.*|THEREFORE|THUS")
_DOUBT = frozenset({"?", "COULD", "MAY", "MIGHT", "WAS", "WOULD"})
"""Words directly after an order that is only mentioned."""
_STOPS = frozenset(".;!?")
_PROSE = (Token.WORD, Token.ACTION, Token.VIA)
_BETWEEN = (Token.SOFT, Token.DASH, Token.CLOSE)

Block = list[str | None]
"""Orders without a line of prose between them; None: an illegal order."""


@dataclass(slots=True, kw_only=True)
class WrittenOrders:
    chosen: list[Block] = field(default_factory=lambda: [[]])
    """Orders that begin a clause."""
    rejected: list[Block] = field(default_factory=lambda: [[]])
    """Orders that begin a clause below a heading, or after a label, that rejects them."""
    refused: set[str | None] = field(default_factory=set)
    """Those of them whose heading or label means it, as "Rejected" does and "Next" does not."""
    mentioned: list[Block] = field(default_factory=lambda: [[]])
    """Legal orders within sentences that do not reject them."""
    prose_first: bool = False
    """A line of prose comes before the first chosen order."""


def written_orders(text: str, legal: LegalOrders) -> WrittenOrders:
    reader = _Reader(legal)
    for line in lines_of(text):
        reader.read(line)
    return reader.written


class _Reader:
    def __init__(self, legal: LegalOrders) -> None:
        self.written = WrittenOrders()
        self._grammar = OrderGrammar(legal)
        self._waives = legal.kind is OrderKind.BUILD
        self._heading_verb = self._verb = ""
        """Action of the latest heading, and of a label in the line; after "Builds:" a unit alone is an order."""
        self._rejects, self._used = 0, False
        """The latest heading rejects its orders, see `_rejects`; it had some."""

    def read(self, line: Sequence[Lexeme]) -> None:
        if not line:
            self._rejects *= not self._used
        rejects, ordered = self._rejects, False
        self._verb = self._heading_verb
        for clause in self._clauses(line):
            if isinstance(clause, Match):
                (self.written.rejected if rejects else self.written.chosen)[-1].append(clause.order)
                if rejects > 1:
                    self.written.refused.add(clause.order)
                ordered = self._used = True
            elif clause[-1].text == ":":
                rejects, self._verb = _rejects(clause), _verb(clause)
            elif not _rejects(clause):
                self._mentions(clause)
        if not ordered and any(token.kind in _PROSE or token.kind is Token.FILLER for token in line):
            self._heading(line)

    def _clauses(self, line: Sequence[Lexeme]) -> Iterator[Match | Sequence[Lexeme]]:
        """The orders that begin a clause, and the other clauses. A sentence that begins with no order is one clause."""
        at, follows = 0, False
        places: set[str] = set()  # of the units ordered in this line
        while at < len(line):
            if (match := self._match(line, at)) is not None:
                after = line[match.end].text if match.end < len(line) else "|"
                if after not in _DOUBT and not (
                    places and line[at - 1].text == "|" and (after != "|" or match.place in places)
                ):  # in a table, a column after the orders has reasons
                    yield match
                    places.add(match.place)
                self._verb = _verb(line[at : at + 1]) or self._verb
                at, follows = self._after(line, match.end), True
            elif (end := _clause_end(line, at, follows)) > at:
                yield line[at:end]
                at = end
            elif follows and line[at].kind is Token.OPEN and line[at - 1].kind is Token.SOFT:
                at = _after_bracket(line, at)
            else:
                follows = follows and line[at].text not in _STOPS
                at += 1

    def _match(self, line: Sequence[Lexeme], at: int) -> Match | None:
        if line[at].kind is Token.WAIVE and self._waives:
            return Match(order=WAIVE, end=at + 1, place="", typed=True)
        if line[at].kind not in (Token.UNIT, Token.PLACE, Token.ACTION):
            return None
        match = self._grammar.at(line, at, self._verb)
        return match if match is not None and (match.order is not None or match.typed) else None

    def _after(self, line: Sequence[Lexeme], at: int) -> int:
        while at < len(line):
            near = next((n for n in range(at, min(at + 4, len(line))) if line[n].kind not in _BETWEEN), at)
            if line[near].kind is Token.UNIT and self._match(line, near) is not None:
                return near
            while at < len(line) and line[at].kind is not Token.OPEN:
                if line[at].kind in (Token.JOIN, Token.SOFT):
                    return at
                at += 1
            at = _after_bracket(line, at)
        return at

    def _mentions(self, clause: Sequence[Lexeme]) -> None:
        for at, token in enumerate(clause):
            if token.kind is Token.UNIT and (match := self._grammar.at(clause, at)) is not None and match.order is not None:
                self.written.mentioned[-1].append(match.order)

    def _heading(self, line: Sequence[Lexeme]) -> None:
        """Take a line without an order as the heading of the next lines, unless it is a sentence. A line such as "Reason: it is
        risky" rejects nothing below it, but keeps an earlier heading; of "Alternative: the north" the label counts."""
        label = next((line[:at] for at, token in enumerate(line[:-1]) if token.text == ":"), line)
        label = label if label is line else [token for token in label if not _REASON.fullmatch(token.text)]
        self._rejects = (self._rejects or _rejects(label)) if line[-1].text not in _STOPS and _rejects(line) else 0
        self._used, self._heading_verb = False, _verb(line)
        self.written.prose_first |= not any(self.written.chosen) and any(token.kind is Token.WORD for token in line)
        for blocks in (self.written.chosen, self.written.rejected, self.written.mentioned):
            blocks.append([])


def _after_bracket(line: Sequence[Lexeme], start: int) -> int:
    return next((at + 1 for at in range(start, len(line)) if line[at].kind is Token.CLOSE), len(line))


def _clause_end(line: Sequence[Lexeme], start: int, follows: bool) -> int:
    """Index after the prose or label that begins here; `start` if none does."""
    end = start
    if line[start].kind in _PROSE:
        while end < len(line) and line[end].kind is not Token.SOFT:
            if line[end].kind is Token.JOIN and (follows or line[end].text in _STOPS):
                return end
            end += 1
    elif line[start].kind is Token.FILLER:
        end = start + 1
    label = next((n for n in range(end, min(end + 3, len(line))) if line[n].text not in ('"', "'")), end)
    if end > start and label < len(line) and line[label].text == ":":
        return label + 1
    return end if line[start].kind in _PROSE else start


def _rejects(tokens: Sequence[Lexeme]) -> int:
    """0: not at all; 1: maybe, as "Next" or "If Italy waits"; 2: certainly."""
    words = [token.text for token in tokens]
    gives = any(_GIVING.fullmatch(word) and before != "NOT" for before, word in pairwise(("", *words)))
    if gives or not (any(map(_REJECTING.fullmatch, words)) or ("PLAN", "B") in pairwise(words)):
        return 0
    return 2 if any(map(_REFUSING.fullmatch, words)) else 1


def _verb(tokens: Sequence[Lexeme]) -> str:
    actions = {token.value for token in tokens if token.kind is Token.ACTION and len(token.text) > 1}
    return actions.pop() if len(actions) == 1 and actions <= {"B", "D", "H"} else ""
