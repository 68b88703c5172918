"""Parses the order set in a model's answer, whatever its formatting, and counts its defects.

Thoughts, finished or not, are no part of the answer. The last complete order set counts. If none is complete, the last order for
each site counts, because a model may change its mind. An order below a heading such as "Next" or "If Italy waits" counts only
where one is missing. The parser does not guess at illegal orders.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from entente.game.legal import WAIVE, LegalOrders, OrderKind
from entente.players.written_orders import Block, WrittenOrders, written_orders

_NAMES = "think(?:ing)?|antthinking|thoughts?|reason(?:ing)?|analysis|reflection|scratchpad"
_THOUGHT = re.compile(
    rf"(?P<open><(?:[a-z]+:)?(?:{_NAMES})>|\[think\]|\u25c1think\u25b7|<\|begin_of_thought\|>"
    r"|<\|channel\|>(?:analysis|commentary)[^<\n]{0,80}<\|message\|>)"
    rf"|</(?:[a-z]+:)?(?:{_NAMES})>|\[/think\]|\u25c1/think\u25b7|<\|end_of_thought\|>|<\|channel\|>final<\|message\|>",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCounts:
    answers: int = 0
    """Decisions that it was asked to make."""
    unanswered: int = 0
    """Those without a valid response in time."""
    unparsable: int = 0
    """Those whose answer had no order."""
    orders: int = 0
    """Orders that these decisions needed."""
    missing: int = 0
    """Those without a legal order: the unit held, was disbanded, or a build was waived."""
    illegal: int = 0
    """Orders in answers that are illegal or surplus."""

    def __add__(self, other: "AnswerCounts") -> "AnswerCounts":
        return AnswerCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def sentence(self) -> str:
        return (
            f"asked for {self.answers} decisions, of which {self.unanswered} had no answer and {self.unparsable} an answer "
            f"without an order; {self.missing} of {self.orders} orders were missing ({self.missing / max(1, self.orders):.1%}), "
            f"and the answers had {self.illegal} illegal orders"
        )


def read_answer(text: str, legal: LegalOrders, *, cut_off: bool = False) -> tuple[list[str], AnswerCounts]:
    """The order set in an answer, legal and complete, and the counts of this decision. `cut_off`: by the token limit; such an
    answer may be an unfinished thought, so it counts only if it begins with orders or contains the end of a thought."""
    answer = without_thoughts(text)
    begun = answer[: max(map(answer.rfind, "\n,;")) + 1] if cut_off else answer  # the last order may lack its end
    written = written_orders(begun, legal)
    if cut_off and written.prose_first and answer == text:
        written = WrittenOrders()
    blocks = next((blocks for blocks in (written.chosen, written.rejected, written.mentioned) if any(blocks)), [])
    orders, illegal = _last_set(blocks, legal)
    if blocks is written.chosen and not illegal and legal.kind is not OrderKind.BUILD:
        # Where orders are missing, a heading such as "If Italy waits" or "Next" has rejected nothing.
        for site, order in _last_set(written.rejected, legal)[0].chosen.items():
            if len(orders.chosen) < legal.picks and order not in written.refused:
                orders.chosen.setdefault(site, order)
    missing = max(0, legal.picks - len(orders.chosen) - orders.waived)
    counts = AnswerCounts(answers=1, unparsable=int(not blocks), orders=legal.picks, missing=missing, illegal=illegal)
    return _completed(orders.chosen, legal), counts


def no_answer(legal: LegalOrders) -> tuple[list[str], AnswerCounts]:
    counts = AnswerCounts(answers=1, unanswered=1, orders=legal.picks, missing=legal.picks)
    return _completed({}, legal), counts


def _completed(chosen: dict[int, str], legal: LegalOrders) -> list[str]:
    if legal.kind is OrderKind.DISBAND:  # a disband that is owed must name a unit: the first ones
        for site in range(len(legal.sites)):
            if len(chosen) < legal.picks:
                chosen.setdefault(site, legal.options[site][0])
    completed = legal.completed([chosen[site] for site in sorted(chosen)])
    assert completed is not None, "every disband that is owed has a unit"
    return list(completed)


def without_thoughts(text: str) -> str:
    """The text outside thoughts. A thought without a start mark began in the prompt; one without an end mark goes to the end."""
    parts: list[str] = []
    start, outside = 0, True
    for mark in _THOUGHT.finditer(text):
        if mark["open"] and outside:
            parts.append(text[start : mark.start()])
            outside = False
        elif not mark["open"]:
            if outside:
                parts.clear()
            start, outside = mark.end(), True
    return "".join((*parts, text[start:] if outside else ""))


@dataclass(slots=True)
class _Set:
    picks: int
    chosen: dict[int, str] = field(default_factory=dict)
    waived: int = 0

    @property
    def is_complete(self) -> bool:
        return 0 < self.picks <= len(self.chosen) + self.waived


def _last_set(blocks: Sequence[Block], legal: LegalOrders) -> tuple[_Set, int]:
    """The last set complete within one block, or else over several, or else each site's last order; and the number of illegal
    orders up to its block's end."""
    site_of = {order: site for site, options in enumerate(legal.options) for order in options}
    complete: _Set | None = None
    latest = _Set(legal.picks)
    illegal = counted = 0
    for block in filter(None, blocks):
        own, rest, wrong = _sets_in(block, _Set(legal.picks), site_of)
        if own is None:
            own, rest, wrong = _sets_in(block, latest, site_of)
        latest, illegal = rest, illegal + wrong
        if own is not None:
            complete, counted = own, illegal
    return (latest, illegal) if complete is None else (complete, counted)


def _sets_in(block: Block, latest: _Set, site_of: Mapping[str, int]) -> tuple[_Set | None, _Set, int]:
    """The last set that a block completes, the incomplete one after it, and the number of illegal orders. Orders for other sites
    right after a complete set are builds or disbands too many, and no new set."""
    complete: _Set | None = None
    illegal = 0
    for order in block:
        if order == WAIVE:
            latest.waived += complete is None
        elif order is None or (complete is not None and not latest.chosen and site_of[order] not in complete.chosen):
            illegal += 1
        else:
            latest.chosen[site_of[order]] = order
        if latest.is_complete:
            complete, latest = latest, _Set(latest.picks)
    return complete, latest, illegal
