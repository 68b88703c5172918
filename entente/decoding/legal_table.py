"""The legal-order automaton: the tokens allowed next, so that a completion encodes exactly one legal order set.

A `LegalTable` is an acyclic automaton in CSR form: node -> allowed token ids, each with its next node. A path to the end encodes
one order per site, in site order, within the budget of builds and disbands. Every legal order set has exactly one token path, no
option is a proper prefix of another, and `longest` is the length of the longest path.

A table may start with a thought (`entente/decoding/thinking.py`). A completion is then in a *state*: a node, or, in its thought,
the number of tokens left, as -1 - left. Node 0 of such a table has one token, the marker that ends the thought.

A table is ints, sent as bytes; engines, rows and the trainer use the same one. Only numpy is imported: vLLM's server imports
this.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from entente.decoding.open_set import open_set
from entente.telemetry.errors import DataError

END = -1
"""The target of an edge that completes the completion, and the state after it."""
_FORMAT, _FORMAT_WITH_THOUGHT = 1, 2
_HEADERS = {_FORMAT: 4, _FORMAT_WITH_THOUGHT: 7}
"""Header integers by format; the excluded ids of a thought follow them."""


@dataclass(frozen=True, kw_only=True)
class ThoughtRule:
    budget: int
    """Maximum tokens of the thought, 1 or more. A sampled end marker counts as one, a forced one does not."""
    end: int
    """Exclusive upper bound of its ids."""
    excluded: tuple[int, ...]
    """The model's end tokens, which a thought never contains, ascending."""

    @cached_property
    def legal_set(self) -> np.ndarray:
        return open_set(self.excluded, self.end)

    def check(self, first: np.ndarray, last: np.ndarray) -> None:
        """Check the rule of a received table.

        Args:
            first: token ids allowed at node 0, which must be the end marker alone.
            last: token ids that end a completion, which must be excluded.

        Raises:
            DataError: the message names the violation.
        """
        if self.budget < 1:
            raise DataError(f"legal table has a thought of {self.budget} tokens: it must be at least 1")
        ascends = all(low < high for low, high in pairwise((-1, *self.excluded, self.end)))
        if not self.excluded or not ascends or not np.isin(last, self.excluded).all():
            raise DataError(f"legal table excludes tokens {self.excluded} from its thought, but another one ends its completions")
        if len(first) != 1 or first[0] >= self.end or first[0] in self.excluded:
            raise DataError("legal table has a thought without a single token that ends it")


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
    _bytes: bytes | None = field(default=None, repr=False, compare=False)
    """Cached `to_bytes`: forks send the same table many times."""
    _forced: dict[int, tuple[list[int], int]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def start(self) -> int:
        """The state before the first token: node 0, or the thought with its whole budget."""
        return 0 if self.thought is None else -1 - self.thought.budget

    @property
    def largest_id(self) -> int:
        largest = int(self.token_ids.max())
        return largest if self.thought is None else max(largest, self.thought.end - 1)

    def to_bytes(self) -> bytes:
        """Little-endian int32: format, nodes, edges, longest, then the three arrays; cached. With a thought the format number
        differs, and budget, end, number of excluded ids and these ids follow `longest`."""
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
    def from_bytes(cls, data: bytes) -> "LegalTable":
        """Read and check a table, but not against a vocabulary: an engine compares `largest_id` with its own. Raises DataError if
        it is not a complete, acyclic table."""
        if len(data) < 16 or len(data) % 4:
            raise DataError(f"legal table of {len(data)} bytes is incomplete")
        values = np.frombuffer(data, "<i4")
        form, nodes, edges, longest = (int(v) for v in values[:4])
        head = _HEADERS.get(form, 0)
        if not head:
            known = " and ".join(map(str, _HEADERS))
            raise DataError(
                f"legal table has format {form}, and this release of entente reads {known}: it is not a table, or client and "
                "server have different releases"
            )
        if form == _FORMAT_WITH_THOUGHT and len(values) >= head:
            head += max(0, int(values[head - 1]))
        if nodes < 1 or edges < nodes or len(values) != head + nodes + 1 + 2 * edges:
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
        if (ids < 0).any():
            raise DataError("legal table allows a token below 0")
        if ((np.diff(ids) <= 0) & (source[1:] == source[:-1])).any():
            raise DataError("legal table has a node whose allowed tokens are not in rising order")
        thought = None
        if form == _FORMAT_WITH_THOUGHT:
            budget, end, _, *excluded = (int(v) for v in values[4:head])
            thought = ThoughtRule(budget=budget, end=end, excluded=tuple(excluded))
            thought.check(ids[: offsets[1]], ids[nexts == END])
        deepest = _longest_path(offsets, nexts) + (thought.budget if thought else 0)
        if longest != deepest:
            raise DataError(f"legal table claims a longest completion of {longest} tokens, but has one of {deepest}")
        return cls(offsets=offsets, token_ids=ids, next_nodes=nexts, longest=longest, thought=thought, _bytes=data)

    def allowed(self, state: int) -> np.ndarray:
        """The legal set at `state`, int32: its ids, sorted, or in a thought an open set (`entente/decoding/open_set.py`)."""
        if state < END:
            return self._rule.legal_set
        return self.token_ids[self.offsets[state] : self.offsets[state + 1]]

    def advance(self, state: int, token: int) -> int:
        """State after `token` at `state`; END if complete. Raises DataError if the token is not legal there."""
        if state < END:
            return self._think(state, token)
        low, high = (0, 0) if state == END else (int(self.offsets[state]), int(self.offsets[state + 1]))
        edge = low + int(np.searchsorted(self.token_ids[low:high], token))
        if edge >= high or self.token_ids[edge] != token:
            raise DataError(f"token {token} is not legal at node {state} of its table")
        return int(self.next_nodes[edge])

    def forced(self, state: int) -> tuple[list[int], int]:
        """The tokens after `state` while exactly one is legal (cached, do not change), and the state after: branching, or END."""
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
        rule = self._rule
        if token == self.token_ids[0]:
            return int(self.next_nodes[0])
        if not 0 <= token < rule.end or token in rule.excluded:
            raise DataError(f"token {token} is not legal in a thought")
        return state + 1 if state + 1 < END else 0

    def legal_sets(self, completion: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Legal sets by position, as CSR: ids int32 [sum], offsets int32 [len + 1]. Raises DataError if not legal."""
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


def _longest_path(offsets: np.ndarray, next_nodes: np.ndarray) -> int:
    """Tokens of the longest path from node 0. Every edge leads to a higher node, so one backward pass is enough."""
    starts, targets = offsets.tolist(), next_nodes.tolist()
    depth = [0] * len(starts)  # the last entry, index -1, belongs to END
    for node in range(len(starts) - 2, -1, -1):
        depth[node] = 1 + max(depth[target] for target in targets[starts[node] : starts[node + 1]])
    return depth[0]
