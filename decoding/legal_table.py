"""The legal-order automaton: which tokens may come next, so that a completion spells exactly one legal order set.

A `LegalTable` is a flat acyclic automaton in CSR form: node -> allowed token ids, and for each the next node. Whatever walks it
to the end has spelled, in the notation of its builder, one order per site, in the order of the sites, within the build and
disband budget; every legal set of orders has exactly one token path, no option is a proper prefix of another, and no path can
be longer than `longest`.
The table is plain integers: it travels as bytes, and drives engines, rows and trainer alike. It never sees logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from decoding.codec import Codec
from game.legal import WAIVE, LegalOrders, OrderKind
from game.notation import answer_lines, option_lines
from game.prompt_settings import OrderNotation
from telemetry.errors import DataError, InputError

END = -1
_FORMAT = 1

_Option = tuple[tuple[int, ...], int]
"""Token ids of one option with its end mark, and the index of the root that follows (END: the completion is whole)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalTable:
    """Automaton over token ids; node 0 is the start, and every edge leads to a higher node or to END."""

    offsets: np.ndarray
    """int32 [nodes + 1]; edges of node n are [offsets[n], offsets[n + 1])."""
    token_ids: np.ndarray
    """int32 [edges], sorted within a node."""
    next_nodes: np.ndarray
    """int32 [edges]; END (-1) where the completion is whole."""
    longest: int
    """Tokens of the longest completion, end mark included."""
    _bytes: bytes | None = field(default=None, repr=False, compare=False)
    """The table as it travels, once it has: forks send the same one many times."""
    _sound: bool = field(default=False, repr=False, compare=False)
    """It was built by rule, or checked; one put together by hand has to pass `from_bytes` like any that comes from outside."""
    _forced: dict[int, tuple[list[int], int]] = field(default_factory=dict, repr=False, compare=False)
    """What `forced` has told of a node before."""

    @property
    def is_sound(self) -> bool:
        """Known to be a whole, acyclic table, without another look."""
        return self._sound

    def to_bytes(self) -> bytes:
        """Little-endian int32: format, nodes, edges, longest, then the three arrays; the same object each time."""
        data = self._bytes
        if data is None:
            head = np.array([_FORMAT, len(self.offsets) - 1, len(self.token_ids), self.longest], "<i4")
            parts = (head, self.offsets, self.token_ids, self.next_nodes)
            data = b"".join(part.astype("<i4", copy=False).tobytes() for part in parts)
            object.__setattr__(self, "_bytes", data)
        return data

    @classmethod
    def from_bytes(cls, data: bytes, vocabulary_size: int | None = None) -> "LegalTable":
        """Read and check a table that came from elsewhere.

        Raises:
            DataError: it is not a whole, acyclic table over the vocabulary; the sentence says which rule it breaks.
        """
        if len(data) < 16 or len(data) % 4:
            raise DataError(f"legal table of {len(data)} bytes is cut")
        values = np.frombuffer(data, "<i4")
        form, nodes, edges, longest = (int(v) for v in values[:4])
        if form != _FORMAT or nodes < 1 or edges < nodes or len(values) != 4 + nodes + 1 + 2 * edges:
            raise DataError(
                f"legal table has format {form}, {nodes} nodes and {edges} edges in {len(values)} integers: not a table"
            )
        offsets, ids, nexts = np.split(values[4:], [nodes + 1, nodes + 1 + edges])
        sizes = np.diff(offsets.astype(np.int64))  # the difference of two int32 may not fit one
        if offsets[0] != 0 or offsets[-1] != edges or (sizes < 1).any():
            raise DataError("legal table has a node without any allowed token, or edges that overlap")
        source = np.repeat(np.arange(nodes), sizes)
        if not np.all((nexts == END) | ((nexts > source) & (nexts < nodes))):
            raise DataError("legal table has an edge that leads backwards or outside")
        if (ids < 0).any() or (vocabulary_size is not None and (ids >= vocabulary_size).any()):
            raise DataError(f"legal table allows a token outside the vocabulary of {vocabulary_size}")
        if ((np.diff(ids) <= 0) & (source[1:] == source[:-1])).any():
            raise DataError("legal table has a node whose allowed tokens do not rise")
        deepest = _longest_path(offsets, nexts)
        if longest != deepest:
            raise DataError(f"legal table claims a longest completion of {longest} tokens, but has one of {deepest}")
        return cls(offsets=offsets, token_ids=ids, next_nodes=nexts, longest=longest, _bytes=data, _sound=True)

    def allowed(self, node: int) -> np.ndarray:
        """Token ids allowed at `node`, int32, sorted."""
        return self.token_ids[self.offsets[node] : self.offsets[node + 1]]

    def advance(self, node: int, token: int) -> int:
        """Node after `token` at `node`; END when the completion is whole.

        Raises:
            DataError: the token is not legal there.
        """
        low, high = (0, 0) if node == END else (int(self.offsets[node]), int(self.offsets[node + 1]))
        edge = low + int(np.searchsorted(self.token_ids[low:high], token))
        if edge >= high or self.token_ids[edge] != token:
            raise DataError(f"token {token} is not legal at node {node} of its table")
        return int(self.next_nodes[edge])

    def forced(self, node: int) -> tuple[list[int], int]:
        """The tokens that must follow at `node`, for as long as a single one is legal, and the node after them.

        That is a node with a choice, or END. The list is shared: it must not be changed.
        """
        found = self._forced.get(node)
        if found is None:
            tokens, at = [], node
            while at != END and self.offsets[at + 1] - self.offsets[at] == 1:
                edge = self.offsets[at]
                tokens.append(int(self.token_ids[edge]))
                at = int(self.next_nodes[edge])
            found = self._forced[node] = tokens, at
        return found

    def legal_sets(self, completion: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Legal set of each position of a whole completion, as CSR: ids int32 [sum], offsets int32 [len(completion) + 1].

        Raises:
            DataError: the completion leaves the table, or stops before its end.
        """
        node, sets = 0, []
        for position, token in enumerate(completion):
            if node == END:
                raise DataError(f"completion goes on after its end, at position {position}")
            sets.append(self.allowed(node))
            node = self.advance(node, int(token))
        if node != END:
            raise DataError(f"completion of {len(completion)} tokens stops before its end")
        offsets = np.zeros(len(sets) + 1, np.int32)
        np.cumsum([len(s) for s in sets], out=offsets[1:])
        return np.concatenate(sets).astype(np.int32), offsets


class TableBuilder:
    """Makes the tables of one codec and order notation, each distinct set of legal orders once (a bounded memo)."""

    def __init__(self, codec: Codec, notation: OrderNotation = "full", memo: int = 1024) -> None:
        self._codec = codec
        self._notation: OrderNotation = notation
        self.table = lru_cache(maxsize=memo)(self._build)
        self._spelled = lru_cache(maxsize=65536)(self._spell_line)

    def spell(self, orders: Sequence[str], legal: LegalOrders) -> list[int]:
        """The one token path of an order set, given in the order of its sites (builds followed by their waives).

        Raises:
            InputError: an order is none of the legal ones.
        """
        return self.spell_lines(answer_lines(orders, legal, self._notation))

    def spell_lines(self, lines: Sequence[str]) -> list[int]:
        """The tokens of an answer given line by line, in the builder's notation already."""
        ids: list[int] = []
        for line in lines:
            ids.extend(self._codec.encode_order(line))
            ids.append(self._codec.separator_id)
        ids[-1] = self._codec.eos_id
        return ids

    def read(self, completion: Sequence[int], legal: LegalOrders) -> list[str]:
        """Order texts that a whole completion spells, waives included.

        Raises:
            DataError: a line is none of the legal orders.
        """
        by_site = [
            {self._codec.encode_order(line): order for line, order in zip(lines, options, strict=True)}
            for lines, options in zip(option_lines(legal, self._notation), legal.options, strict=True)
        ]
        if legal.kind in (OrderKind.BUILD, OrderKind.DISBAND):  # a line may speak of any site, and says which
            waive = {self._codec.encode_order(WAIVE): WAIVE}
            by_site = [{ids: order for own in (*by_site, waive) for ids, order in own.items()}] * legal.picks
        orders, line = [], []
        for token in completion:
            if token in (self._codec.separator_id, self._codec.eos_id):
                texts = by_site[len(orders)] if len(orders) < len(by_site) else {}
                if tuple(line) not in texts:
                    raise DataError(f"completion line {len(orders) + 1} of {legal.power} spells no legal order")
                orders.append(texts[tuple(line)])
                line = []
            else:
                line.append(int(token))
        return orders

    def order_logprobs(self, completion: Sequence[int], logprobs: Sequence[float]) -> list[float]:
        """Log-probability of each order that a whole completion spells, given the orders before it; nats.

        They add up to the completion's own: an order's tokens and its end mark are one factor of it.
        """
        sums, begun = [], 0.0
        for token, logprob in zip(completion, logprobs, strict=True):
            begun += float(logprob)
            if token in (self._codec.separator_id, self._codec.eos_id):
                sums.append(begun)
                begun = 0.0
        return sums

    def _build(self, legal: LegalOrders) -> LegalTable:
        if legal.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT):
            return _assemble(self._one_order_per_site(legal))
        return _assemble(self._choice_of_sites(legal))

    def _spell_line(self, line: str, is_last: bool) -> tuple[int, ...]:
        return (*self._codec.encode_order(line), self._codec.eos_id if is_last else self._codec.separator_id)

    def _one_order_per_site(self, legal: LegalOrders) -> list[list[_Option]]:
        last, spelled = len(legal.sites) - 1, self._spelled
        sites = []
        for site, lines in enumerate(option_lines(legal, self._notation)):
            is_last, following = site == last, END if site == last else site + 1
            sites.append([(spelled(line, is_last), following) for line in lines])
        return sites

    def _option(self, line: str, following: int) -> _Option:
        return self._spelled(line, following == END), following

    def _choice_of_sites(self, legal: LegalOrders) -> list[list[_Option]]:
        """Roots (orders given so far, first site still open): sites are taken in rising order, so each choice has one path."""
        picks, sites, may_waive = legal.picks, len(legal.sites), legal.kind == OrderKind.BUILD
        states = {(0, 0)}
        for given in range(1, picks):
            for before, first in [state for state in states if state[0] == given - 1]:
                states |= {(given, site + 1) for site in self._open_sites(before, first, picks, sites, may_waive)}
            if may_waive:
                states.add((given, sites))
        # Sorted by orders given, so that every edge leads to a higher root.
        number = {state: index for index, state in enumerate(sorted(states))}

        lines = option_lines(legal, self._notation)
        roots: list[list[_Option]] = []
        for given, first in number:
            options = [
                self._option(text, number.get((given + 1, site + 1), END))
                for site in self._open_sites(given, first, picks, sites, may_waive)
                for text in lines[site]
            ]
            if may_waive:
                options.append(self._option(WAIVE, number.get((given + 1, sites), END)))
            roots.append(options)
        return roots

    @staticmethod
    def _open_sites(given: int, first: int, picks: int, sites: int, may_waive: bool) -> range:
        """Sites that may take the next order; a disband must leave enough sites for those still owed."""
        return range(first, sites if may_waive else sites - (picks - given) + 1)


def _assemble(roots: Sequence[Sequence[_Option]]) -> LegalTable:
    """Flat automaton from the options of each root; node numbers rise along every path.

    A root's options are taken in sorted order, so that each shares its beginning with the one before it or with none, and the
    edges of a node come in the order of their tokens.
    """
    starts, nodes = [], 0
    sources, tokens, targets = [], [], []  # of each edge; a target below END stands for root -2 - target
    for options in roots:
        path, before = [nodes], ()
        starts.append(nodes)
        nodes += 1
        for ids, following in sorted(options):
            shared, last = 0, len(ids) - 1
            for token, other in zip(ids, before, strict=False):
                if token != other:
                    break
                shared += 1
            if shared == len(before) > 0:
                raise InputError(f"option {before} is option {ids} or its beginning: no end mark parts them")
            del path[shared + 1 :]
            for token in ids[shared:last]:
                sources.append(path[-1])
                tokens.append(token)
                targets.append(nodes)
                path.append(nodes)
                nodes += 1
            sources.append(path[-1])
            tokens.append(ids[last])
            targets.append(END if following == END else -2 - following)
            before = ids
    source = np.array(sources, np.int32)
    by_source = np.argsort(source, kind="stable")
    offsets = np.zeros(nodes + 1, np.int32)
    np.cumsum(np.bincount(source, minlength=nodes), out=offsets[1:])
    next_nodes = np.array(targets, np.int32)[by_source]
    to_root = next_nodes < END
    next_nodes[to_root] = np.array(starts, np.int32)[-2 - next_nodes[to_root]]
    return LegalTable(
        offsets=offsets,
        token_ids=np.array(tokens, np.int32)[by_source],
        next_nodes=next_nodes,
        longest=_longest_choice(roots),
        _sound=True,
    )


def _longest_choice(roots: Sequence[Sequence[_Option]]) -> int:
    """Tokens of the longest completion; a root leads to later ones only."""
    rest = [0] * (len(roots) + 1)  # its last place stands for END, which is index -1
    for root in range(len(roots) - 1, -1, -1):
        rest[root] = max(len(ids) + rest[following] for ids, following in roots[root])
    return rest[0]


def _longest_path(offsets: np.ndarray, next_nodes: np.ndarray) -> int:
    """Tokens of the longest walk from node 0; every edge leads to a higher node, so one pass from the back is enough."""
    starts, targets = offsets.tolist(), next_nodes.tolist()
    depth = [0] * len(starts)  # its last place stands for END, which is index -1
    for node in range(len(starts) - 2, -1, -1):
        depth[node] = 1 + max(depth[target] for target in targets[starts[node] : starts[node + 1]])
    return depth[0]
