"""The legal-order automaton: which tokens may come next, so that a completion spells exactly one legal order set.

A `LegalTable` is an acyclic automaton in CSR form: node -> allowed token ids, each with its next node. A path to the end spells
one order per site, in the order of the sites, within the budget of builds and disbands. Every legal
order set has exactly one token path, no option is a proper prefix of another, and `longest` is the length of the longest path.

A table may begin with a thought (`entente/decoding/thinking.py`). A completion is then in a *state*: a node, or, in its thought,
the number of tokens left, as -1 - left. Node 0 of such a table has one token, the marker that ends the thought. Without a thought
a state is always a node.

A table consists of ints and is sent as bytes. Engines, rows and the trainer use the same table. This module does not use
logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from entente.decoding.codec import Codec
from entente.decoding.option_trie import END, TokenLines, assemble
from entente.decoding.thinking import Thinking, ThoughtRule
from entente.game.legal import WAIVE, LegalOrders, OrderKind
from entente.telemetry.errors import DataError, InputError

_FORMAT, _FORMAT_WITH_THOUGHT = 1, 2
_HEADERS = {_FORMAT: 4, _FORMAT_WITH_THOUGHT: 7}
"""Numbers before the arrays, by format; the excluded ids of a thought are between the two."""

_Options = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows, roots and following roots of the options of a table; see `assemble`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalTable:
    """Automaton over token ids. Node 0 is the start, and every edge leads to a higher node or to END."""

    offsets: np.ndarray
    """int32 [nodes + 1]; the edges of node n are [offsets[n], offsets[n + 1])."""
    token_ids: np.ndarray
    """int32 [edges], sorted within each node."""
    next_nodes: np.ndarray
    """int32 [edges]; END (-1) if the completion is complete."""
    longest: int
    """Tokens of the longest completion, including the thought and the end mark."""
    thought: ThoughtRule | None = None
    """The thought that every completion begins with; None: completions are orders alone."""
    _bytes: bytes | None = field(default=None, repr=False, compare=False)
    """Result of `to_bytes`, kept because forks send the same table many times."""
    _sound: bool = field(default=False, repr=False, compare=False)
    """True if the builder made the table or `from_bytes` checked it."""
    _forced: dict[int, tuple[list[int], int]] = field(default_factory=dict, repr=False, compare=False)
    """Results of `forced` by node."""

    @property
    def is_sound(self) -> bool:
        """True if the table is known to be complete and acyclic, so that it needs no check."""
        return self._sound

    @property
    def start(self) -> int:
        """The state before the first token: node 0, or the thought with all of its tokens left."""
        return 0 if self.thought is None else -1 - self.thought.budget

    @property
    def largest_id(self) -> int:
        """The largest token id that a completion may contain."""
        largest = int(self.token_ids.max())
        return largest if self.thought is None else max(largest, self.thought.end - 1)

    def to_bytes(self) -> bytes:
        """Little-endian int32: format, nodes, edges, longest, then the three arrays. Repeated calls return the same object.

        With a thought the format is another, and budget, end, number of excluded ids and these ids follow `longest`.
        """
        data = self._bytes
        if data is None:
            rule = self.thought
            header = [len(self.offsets) - 1, len(self.token_ids), self.longest]
            thought = [] if rule is None else [rule.budget, rule.end, len(rule.excluded), *rule.excluded]
            header = [_FORMAT_WITH_THOUGHT if rule else _FORMAT, *header, *thought]
            parts = (np.array(header, "<i4"), self.offsets, self.token_ids, self.next_nodes)
            data = b"".join(part.astype("<i4", copy=False).tobytes() for part in parts)
            object.__setattr__(self, "_bytes", data)
        return data

    @classmethod
    def from_bytes(cls, data: bytes, vocabulary_size: int | None = None) -> "LegalTable":
        """Read and check a table received as bytes.

        Args:
            vocabulary_size: token ids must be below this; None: not checked.

        Raises:
            DataError: it is not a complete, acyclic table over the vocabulary; the message names the broken rule.
        """
        if len(data) < 16 or len(data) % 4:
            raise DataError(f"legal table of {len(data)} bytes is incomplete")
        values = np.frombuffer(data, "<i4")
        form, nodes, edges, longest = (int(v) for v in values[:4])
        head = _HEADERS.get(form, 0)
        if form == _FORMAT_WITH_THOUGHT and len(values) >= head:
            head += max(0, int(values[head - 1]))
        if not head or nodes < 1 or edges < nodes or len(values) != head + nodes + 1 + 2 * edges:
            raise DataError(
                f"legal table has format {form}, {nodes} nodes and {edges} edges in {len(values)} integers: not a table"
            )
        offsets, ids, nexts = np.split(values[head:], [nodes + 1, nodes + 1 + edges])
        sizes = np.diff(offsets.astype(np.int64))  # the difference of two int32 values may overflow int32
        if offsets[0] != 0 or offsets[-1] != edges or (sizes < 1).any():
            raise DataError("legal table has a node without any allowed token, or edges that overlap")
        source = np.repeat(np.arange(nodes), sizes)
        if not np.all((nexts == END) | ((nexts > source) & (nexts < nodes))):
            raise DataError("legal table has an edge to an earlier node or outside the table")
        if (ids < 0).any() or (vocabulary_size is not None and (ids >= vocabulary_size).any()):
            raise DataError(f"legal table allows a token outside the vocabulary of {vocabulary_size}")
        if ((np.diff(ids) <= 0) & (source[1:] == source[:-1])).any():
            raise DataError("legal table has a node whose allowed tokens are not in rising order")
        thought = None
        if form == _FORMAT_WITH_THOUGHT:
            budget, end, _, *excluded = (int(v) for v in values[4:head])
            thought = ThoughtRule(budget=budget, end=end, excluded=tuple(excluded))
            thought.check(ids[: offsets[1]], ids[nexts == END], vocabulary_size)
        deepest = _longest_path(offsets, nexts) + (thought.budget if thought else 0)
        if longest != deepest:
            raise DataError(f"legal table claims a longest completion of {longest} tokens, but has one of {deepest}")
        return cls(offsets=offsets, token_ids=ids, next_nodes=nexts, longest=longest, thought=thought, _bytes=data, _sound=True)

    def allowed(self, state: int) -> np.ndarray:
        """The legal set at `state`, int32: its ids, sorted, or in a thought an open set (`entente/decoding/open_set.py`)."""
        if state < END:
            return self._rule.legal_set
        return self.token_ids[self.offsets[state] : self.offsets[state + 1]]

    def advance(self, state: int, token: int) -> int:
        """State after `token` at `state`; END if the completion is complete.

        Raises:
            DataError: the token is not legal at this state.
        """
        if state < END:
            return self._think(state, token)
        low, high = (0, 0) if state == END else (int(self.offsets[state]), int(self.offsets[state + 1]))
        edge = low + int(np.searchsorted(self.token_ids[low:high], token))
        if edge >= high or self.token_ids[edge] != token:
            raise DataError(f"token {token} is not legal at node {state} of its table")
        return int(self.next_nodes[edge])

    def forced(self, state: int) -> tuple[list[int], int]:
        """The tokens that must follow `state` while exactly one is legal, and the state after them.

        That state has several legal tokens, or it is END. The list is shared and must not be changed.
        """
        if state < END:
            return [], state
        known = self._forced.get(state)
        if known is None:
            tokens, current = [], state
            while current != END and self.offsets[current + 1] - self.offsets[current] == 1:
                edge = self.offsets[current]
                tokens.append(int(self.token_ids[edge]))
                current = int(self.next_nodes[edge])
            known = self._forced[state] = tokens, current
        return known

    @property
    def _rule(self) -> ThoughtRule:
        if self.thought is None:
            raise DataError("a table without a thought has no thought state")
        return self.thought

    def _think(self, state: int, token: int) -> int:
        """State after `token` in the thought."""
        rule = self._rule
        if token == self.token_ids[0]:
            return int(self.next_nodes[0])
        if not 0 <= token < rule.end or token in rule.excluded:
            raise DataError(f"token {token} is not legal in a thought")
        return state + 1 if state + 1 < END else 0

    def legal_sets(self, completion: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The legal set of each position of a completion, as CSR: ids int32 [sum], offsets int32 [len(completion) + 1].

        Raises:
            DataError: a token is not legal, or the completion is too long or too short.
        """
        state, sets = self.start, []
        for position, token in enumerate(completion):
            if state == END:
                raise DataError(f"completion continues after its end, at position {position}")
            sets.append(self.allowed(state))
            state = self.advance(state, int(token))
        if state != END:
            raise DataError(f"completion of {len(completion)} tokens stops before its end")
        offsets = np.zeros(len(sets) + 1, np.int32)
        np.cumsum([len(s) for s in sets], out=offsets[1:])
        return np.concatenate(sets).astype(np.int32), offsets


class TableBuilder:
    """Builds tables for one codec. A bounded cache keeps the table of each set of legal orders."""

    def __init__(self, codec: Codec, memo: int = 1024, thinking: Thinking | None = None) -> None:
        """`thinking`: how completions begin with a thought; None: they are orders alone."""
        self._codec = codec
        self._thinking = thinking
        self.table = lru_cache(maxsize=memo)(self._build)
        self._lines = TokenLines()
        self._known: tuple[dict[str, int], dict[str, int]] = {}, {}
        """Rows of answer lines in `_lines`: before another line, and at the end of the completion."""
        if thinking is not None:
            (self._end_of_thought,) = self._lines.add([(thinking.marker, *thinking.closing)])

    def spell(self, orders: Sequence[str], legal: LegalOrders) -> list[int]:
        """Token ids of an order set, given in the order of its sites (builds, then waives).

        Raises:
            InputError: an order is not legal.
        """
        allowed = {WAIVE} if legal.kind is OrderKind.BUILD else set[str]()
        if illegal := set(orders) - allowed.union(*legal.options):
            raise InputError(f"{legal.power} cannot order {min(illegal)!r}: it is not legal in this {legal.kind} phase")
        return self.spell_lines(orders)

    def spell_lines(self, lines: Sequence[str]) -> list[int]:
        """Token ids of the lines of an answer."""
        ids: list[int] = []
        for line in lines:
            ids.extend(self._codec.encode_order(line))
            ids.append(self._codec.separator_id)
        ids[-1] = self._codec.eos_id
        return ids

    def read(self, completion: Sequence[int], legal: LegalOrders) -> list[str]:
        """Order texts that a complete completion spells, including waives. Its thought is skipped.

        Raises:
            DataError: the thought does not end, or a line is not a legal order.
        """
        by_site = [{self._codec.encode_order(order): order for order in options} for options in legal.options]
        if legal.kind in (OrderKind.BUILD, OrderKind.DISBAND):  # a line may belong to any site, and names it
            waive = {self._codec.encode_order(WAIVE): WAIVE}
            by_site = [{ids: order for orders in (*by_site, waive) for ids, order in orders.items()}] * legal.picks
        orders, line = [], []
        for token in completion if self._thinking is None else self._thinking.split(completion)[1]:
            if token in (self._codec.separator_id, self._codec.eos_id):
                texts = by_site[len(orders)] if len(orders) < len(by_site) else {}
                if tuple(line) not in texts:
                    raise DataError(f"line {len(orders) + 1} of the completion of {legal.power} is not a legal order")
                orders.append(texts[tuple(line)])
                line = []
            else:
                line.append(int(token))
        return orders

    def order_logprobs(self, completion: Sequence[int], logprobs: Sequence[float]) -> list[float]:
        """Log-probability of each order in a complete completion, given the orders before it; nats.

        Each order's value is the sum over its tokens and its end mark, so the values add up to that of the completion without
        its thought.
        """
        first = 0 if self._thinking is None else len(completion) - len(self._thinking.split(completion)[1])
        ends = np.isin(completion[first:], (self._codec.separator_id, self._codec.eos_id))
        of_orders = np.asarray(logprobs, np.float64)[first:]
        found: list[float] = np.bincount(np.cumsum(ends) - ends, of_orders).tolist()
        return found

    def _build(self, legal: LegalOrders) -> LegalTable:
        is_per_site = legal.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT)
        rows, roots, following = self._one_order_per_site(legal) if is_per_site else self._choice_of_sites(legal)
        rule = None
        if self._thinking is not None:
            # The end of the thought is a root of its own, before the others.
            rule, ends_completion = self._thinking.rule, following == END
            rows = np.concatenate([[self._end_of_thought], rows])
            roots = np.concatenate([[0], roots + 1])
            following = np.concatenate([[1], np.where(ends_completion, END, following + 1)])
        offsets, token_ids, next_nodes, longest = assemble(self._lines, rows, roots, following)
        return LegalTable(
            offsets=offsets,
            token_ids=token_ids,
            next_nodes=next_nodes,
            longest=longest + (rule.budget if rule else 0),
            thought=rule,
            _sound=True,
        )

    def _rows(self, lines: Sequence[str], is_last: bool) -> list[int]:
        """Rows in `_lines` of answer lines with the end mark after them."""
        known = self._known[is_last]
        try:
            return [known[line] for line in lines]
        except KeyError:
            end = self._codec.eos_id if is_last else self._codec.separator_id
            new = [line for line in dict.fromkeys(lines) if line not in known]
            known.update(zip(new, self._lines.add([(*self._codec.encode_order(line), end) for line in new]), strict=True))
            return [known[line] for line in lines]

    def _one_order_per_site(self, legal: LegalOrders) -> _Options:
        last, lines = len(legal.sites) - 1, legal.options
        others = [line for own in lines[:-1] for line in own]
        self._codec.encode_orders([*others, *lines[-1]])
        rows = self._rows(others, False) + self._rows(lines[-1], True)
        roots = np.repeat(np.arange(last + 1), [len(own) for own in lines])
        return np.array(rows), roots, np.where(roots == last, END, roots + 1)

    def _choice_of_sites(self, legal: LegalOrders) -> _Options:
        """Options per state of a build or disband: (orders given, first open site).

        Sites are chosen in rising order, so each order set has one path.
        """
        picks, sites, may_waive = legal.picks, len(legal.sites), legal.kind == OrderKind.BUILD
        states = {(0, 0)}
        for given in range(1, picks):
            for before, first in [state for state in states if state[0] == given - 1]:
                states |= {(given, site + 1) for site in self._open_sites(before, first, picks, sites, may_waive)}
            if may_waive:
                states.add((given, sites))
        # States are sorted by orders given, so every edge leads to a higher root.
        number = {state: index for index, state in enumerate(sorted(states))}

        lines = [*legal.options, (WAIVE,)]
        rows, roots, following = [], [], []
        for (given, first), root in number.items():
            chosen = [(site, site + 1) for site in self._open_sites(given, first, picks, sites, may_waive)]
            for site, first_open in [*chosen, (sites, sites)] if may_waive else chosen:  # the last entry of `lines` is a waive
                target = number.get((given + 1, first_open), END)
                found = self._rows(lines[site], target == END)
                rows += found
                roots += [root] * len(found)
                following += [target] * len(found)
        return np.array(rows), np.array(roots), np.array(following)

    @staticmethod
    def _open_sites(given: int, first: int, picks: int, sites: int, may_waive: bool) -> range:
        """Sites available for the next order. A disband must leave enough sites for the remaining ones."""
        return range(first, sites if may_waive else sites - (picks - given) + 1)


def _longest_path(offsets: np.ndarray, next_nodes: np.ndarray) -> int:
    """Tokens of the longest path from node 0. Every edge leads to a higher node, so one backward pass is enough."""
    starts, targets = offsets.tolist(), next_nodes.tolist()
    depth = [0] * len(starts)  # the last entry, index -1, belongs to END
    for node in range(len(starts) - 2, -1, -1):
        depth[node] = 1 + max(depth[target] for target in targets[starts[node] : starts[node + 1]])
    return depth[0]
