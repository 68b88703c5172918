"""The legal tables of all requests in an engine, on its device, and each request's node in its table.

The core of the logits processor; imports torch but not vLLM. The tables form one flat automaton. A request is a slot, and its
state is one node. Advancing, masking and sampling are a few tensor operations over the batch; nothing is copied to the host, so
the GPU never waits. Requests with equal tables share one copy; memory of unused tables is reused.

A slot in a thought (`entente/decoding/thinking.py`) is at its table's first node, and a second number counts the tokens left. A
sampled token outside the table raises no error: the slot is counted and becomes unconstrained.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from entente.decoding.legal_table import END, LegalTable, ThoughtRule

FREE, LOST = 0, 1
"""Nodes of an unconstrained slot. FREE: no table, or past its end. LOST: the slot left its table."""
_TABLES = 2
_WIDTH = 1 << 32
"""An edge's key is node * _WIDTH + token; tokens are 32-bit numbers, so keys are unique."""
_NEVER = torch.iinfo(torch.int64).max
LEAST_EDGES = 1 << 14
"""Smallest capacity, in edges: about a hundred tables of the usual size."""
_OPEN_LOGITS = {"cpu": 1 << 19}
"""Logits of thought tokens per sampling pass, at most: few on a CPU, for its cache, else `_MOST_OPEN_LOGITS`."""
_MOST_OPEN_LOGITS = 1 << 24
_BLOCK = 512
"""Columns of an open set per block, whose probabilities are summed first."""


@dataclass(slots=True)
class _ArenaTable:
    table: LegalTable
    users: int = 0
    root: int = 0
    """First node in the arena; 0 before the table is copied there."""


class LegalArena:
    def __init__(self, slots: int, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._nodes = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._illegal_tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        """Count over slots that were reassigned since."""
        self._left, self._ends = torch.zeros(2, slots, dtype=torch.int64, device=self._device)
        self._excluded = torch.zeros(slots, 1, dtype=torch.int64, device=self._device)
        """Thought tokens left per slot, 0 outside; and its rule: a slot with fewer excluded ids than another repeats its last."""
        self._thoughts: dict[int, ThoughtRule] = {}
        """The rules of the slots whose tables have a thought, as they are on the device."""
        self._least_end = 0
        self._slots: list[_ArenaTable | None] = [None] * slots
        self._starts = [0] * slots
        self._placed: dict[int, _ArenaTable] = {}
        self._new: list[_ArenaTable] = []
        self._reset: set[int] = set()
        self._make_room([], edges=LEAST_EDGES)

    @property
    def illegal_tokens(self) -> int:
        """Requests that sampled a token outside their table; must stay 0. Waits for the device."""
        return int(self._illegal_tokens + (self._nodes == LOST).sum())

    def assign(self, slot: int, table: LegalTable | None, start: int = 0) -> None:
        """Assign `slot` to a request at node `start` of `table` (None: unconstrained), at the next `flush`."""
        before = self._slots[slot]
        if before is not None:
            before.users -= 1
        self._reset.add(slot)
        placed = None
        if table is not None:
            placed = self._placed.get(id(table))
            if placed is None:
                placed = self._placed[id(table)] = _ArenaTable(table)
                self._new.append(placed)
            placed.users += 1
        self._slots[slot], self._starts[slot] = placed, start or (0 if table is None else table.start)

    def flush(self) -> None:
        if self._new:
            self._place_new()
        if self._reset:
            slots = list(self._reset)
            at = self._upload(slots)
            self._illegal_tokens += (self._nodes[at] == LOST).sum()
            self._flush_thoughts(slots, at)
            self._set(slots, at, [self._starts[slot] for slot in slots])
            self._reset.clear()

    def _set(self, slots: Sequence[int], at: Tensor, states: Sequence[int | None]) -> None:
        tables = (self._slots[slot] for slot in slots)
        nodes = [
            LOST if state is None else FREE if state == END or placed is None else placed.root + max(state, 0)
            for placed, state in zip(tables, states, strict=True)
        ]
        self._nodes[at] = self._upload(nodes)
        if self._thoughts:
            self._left[at] = self._upload([max(0, -1 - state) if state is not None else 0 for state in states])

    def _flush_thoughts(self, slots: Sequence[int], at: Tensor) -> None:
        tables = (placed and placed.table for placed in (self._slots[slot] for slot in slots))
        rules = {slot: table.thought for slot, table in zip(slots, tables, strict=True) if table and table.thought}
        if not rules and not self._thoughts:
            return
        self._left[at] = 0
        self._thoughts = {slot: rule for slot, rule in self._thoughts.items() if slot not in self._reset} | rules
        if rules:
            thinkers = self._upload(list(rules))
            width = self._excluded.shape[1]
            most = max(width, *(len(rule.excluded) for rule in rules.values()))
            self._excluded = torch.cat([self._excluded, self._excluded[:, -1:].expand(-1, most - width)], 1)
            padded = [(*rule.excluded, *rule.excluded[-1:] * (most - len(rule.excluded))) for rule in rules.values()]
            self._excluded[thinkers] = self._upload(padded)
            self._ends[thinkers] = self._upload([rule.end for rule in rules.values()])
            self._least_end = min(rule.end for rule in self._thoughts.values())

    def advance(self, slots: Tensor, tokens: Tensor) -> None:
        """Advance distinct `slots` int64 [n] by `tokens` int64 [n]."""
        nodes = self._nodes[slots]
        wanted = nodes * _WIDTH + tokens
        edges = torch.searchsorted(self._keys, wanted)
        is_edge = self._keys[edges] == wanted
        # A token that is not an edge leaves a free slot free; any other slot becomes lost.
        reached = torch.where(is_edge, self._targets[edges], nodes.clamp(max=LOST))
        if self._thoughts:
            left = self._left[slots]
            # The only edge of a slot in a thought is the marker, which ends the thought.
            is_excluded = (tokens.unsqueeze(1) == self._excluded[slots]).any(1)
            goes_on = (left > 0) & ~is_edge & (tokens >= 0) & (tokens < self._ends[slots]) & ~is_excluded
            reached = torch.where(goes_on, nodes, reached)
            self._left[slots] = torch.where(goes_on, left - 1, 0)
        self._nodes[slots] = reached

    def mask(self, logits: Tensor, slots: Tensor) -> Tensor:
        """Set logits [rows, vocabulary] to -inf in place outside the legal sets of `slots` int64 [rows]."""
        nodes = self._nodes[slots]
        tokens, _ = self._listed(nodes)
        legal = logits.gather(1, tokens)
        is_listed = nodes >= _TABLES
        if self._thoughts:
            thinks = self._left[slots] > 0
            self._mask_thoughts(logits, slots, thinks)
            is_listed &= ~thinks
            # In a thought `legal` is the logit of the marker, so rewriting it changes nothing.
        logits.masked_fill_(is_listed.unsqueeze(1), float("-inf"))
        return logits.scatter_(1, tokens, legal)

    def sample(
        self, logits: Tensor, slots: Tensor, uniforms: Tensor, temperatures: Tensor, thinking: Sequence[int] = ()
    ) -> Tensor:
        """Sample one token per row from its slot's legal set, and leave only its logit finite, in place: its log-probability
        under the masked policy at the row's temperature. A slot without a legal set keeps its logits.

        Args:
            logits: float32 [rows, vocabulary].
            slots: int64 [rows].
            uniforms: float64 [rows], random numbers in [0, 1).
            temperatures: float64 [rows], above 0.
            thinking: includes all rows whose slots are in a thought.
        """
        nodes = self._nodes[slots]
        tokens, is_own = self._listed(nodes)
        legal = logits.gather(1, tokens).double().masked_fill_(~is_own, float("-inf"))
        places, logprobs = _sample_places(legal, uniforms, temperatures)
        sampled = tokens.gather(1, places)
        most = max(1, _OPEN_LOGITS.get(self._device.type, _MOST_OPEN_LOGITS) // logits.shape[1])
        for first in range(0, len(thinking), most):
            rows = self._upload(thinking[first : first + most])
            own = pad(logits[rows], (0, -logits.shape[1] % _BLOCK), value=float("-inf"))
            thinks = self._left[slots[rows]] > 0
            self._mask_thoughts(own, slots[rows], thinks)
            ids, ids_logprobs = _sample_open(own, uniforms[rows], temperatures[rows])
            ids.clamp_(max=logits.shape[1] - 1)  # beyond it only where a logit was NaN
            sampled[rows] = torch.where(thinks.unsqueeze(1), ids, sampled[rows])
            logprobs[rows] = torch.where(thinks.unsqueeze(1), ids_logprobs, logprobs[rows])
        has_set = (nodes >= _TABLES).unsqueeze(1)
        left = torch.where(has_set, logprobs.to(logits.dtype), logits.gather(1, sampled))
        logits.masked_fill_(has_set, float("-inf"))
        return logits.scatter_(1, sampled, left)

    def _listed(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of `nodes` int64 [rows], padded to the widest node with their last token, and which are not padding:
        int64 and bool [rows, widest]."""
        lasts = self._lasts[nodes].unsqueeze(1)
        tokens = self._tokens[self._firsts[nodes].unsqueeze(1) + torch.minimum(self._up_to_widest, lasts)]
        return tokens, self._up_to_widest <= lasts

    def _mask_thoughts(self, logits: Tensor, slots: Tensor, thinks: Tensor) -> None:
        """Set the logits of the excluded ids and of the ids from `end` on to -inf, in the rows where `thinks` bool [rows]."""
        excluded = self._excluded[slots]
        kept = logits.gather(1, excluded)
        logits.scatter_(1, excluded, kept.masked_fill_(thinks.unsqueeze(1), float("-inf")))
        beyond = logits[:, self._least_end :]
        if beyond.shape[1]:
            ids = torch.arange(self._least_end, logits.shape[1], device=self._device)
            beyond.masked_fill_(thinks.unsqueeze(1) & (ids >= self._ends[slots].unsqueeze(1)), float("-inf"))

    def _place_new(self) -> None:
        nodes = sum(len(placed.table.offsets) - 1 for placed in self._new)
        edges = sum(len(placed.table.token_ids) for placed in self._new)
        if self._used_nodes + nodes > len(self._firsts) or self._used_edges + edges >= len(self._keys):
            self._placed = {key: placed for key, placed in self._placed.items() if placed.users}
            live = list(self._placed.values())
            self._make_room(live, edges=2 * sum(len(placed.table.token_ids) for placed in live))
        else:
            self._append([placed for placed in self._new if placed.users])
            self._placed = {key: placed for key, placed in self._placed.items() if placed.users or placed.root}
        self._new.clear()

    def _make_room(self, live: Sequence[_ArenaTable], *, edges: int) -> None:
        """Allocate new arrays with only the `live` tables; slots keep their node within their table."""
        roots = [0 if placed is None else placed.root for placed in self._slots]
        # No table has more nodes than edges, so one bound serves both. A search may end one past the last key.
        room = _TABLES + max(edges, LEAST_EDGES) + 1
        self._firsts, self._lasts, self._tokens, self._targets = (
            torch.zeros(room, dtype=torch.int64, device=self._device) for _ in range(4)
        )
        self._keys = torch.full((room,), _NEVER, dtype=torch.int64, device=self._device)
        # For unconstrained nodes `mask` rewrites the logit of the token at index 0 with itself, so they need no special case.
        self._used_nodes, self._used_edges = _TABLES, 0
        self._widest, self._up_to_widest = 1, torch.zeros(1, dtype=torch.int64, device=self._device)
        self._append(live)
        # A slot that waits for its reset is still at a node of its former request, which may be in another table.
        moves = [
            0 if placed is None or slot in self._reset else placed.root - root
            for slot, (placed, root) in enumerate(zip(self._slots, roots, strict=True))
        ]
        self._nodes += torch.where(self._nodes < _TABLES, 0, self._upload(moves))

    def _append(self, added: Sequence[_ArenaTable]) -> None:
        if not added:
            return
        tables = [placed.table for placed in added]
        node_counts = np.array([len(table.offsets) - 1 for table in tables])
        edge_counts = np.array([len(table.token_ids) for table in tables])
        roots = self._used_nodes + np.cumsum(node_counts) - node_counts
        firsts = np.concatenate([table.offsets[:-1] for table in tables]) + np.repeat(
            self._used_edges + np.cumsum(edge_counts) - edge_counts, node_counts
        )
        nodes, edges = self._used_nodes + len(firsts), self._used_edges + int(edge_counts.sum())
        counts = np.diff(firsts, append=edges)
        tokens = np.concatenate([table.token_ids for table in tables]).astype(np.int64)
        targets = np.concatenate([table.next_nodes for table in tables])
        # Nodes ascend in the arena and tokens ascend within a node, so the keys are sorted and can be searched.
        keys = np.repeat(np.arange(self._used_nodes, nodes), counts) * _WIDTH + tokens
        targets = np.where(targets == END, FREE, targets + np.repeat(roots, edge_counts))
        for array, start, values in (
            (self._firsts, self._used_nodes, firsts),
            (self._lasts, self._used_nodes, counts - 1),
            (self._keys, self._used_edges, keys),
            (self._tokens, self._used_edges, tokens),
            (self._targets, self._used_edges, targets),
        ):
            array[start : start + len(values)] = self._upload(values)
        for placed, root in zip(added, roots.tolist(), strict=True):
            placed.root = root
        self._used_nodes, self._used_edges = nodes, edges
        if counts.max() > self._widest:
            self._widest = int(counts.max())
            self._up_to_widest = torch.arange(self._widest, device=self._device)

    def _upload(self, values: Sequence[int] | Sequence[Sequence[int]] | np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(self._device, non_blocking=True)


def _sample_places(legal: Tensor, uniforms: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Sample a column of each row of `legal` float64 [rows, n] (-inf outside the set; changed): the first whose cumulative
    probability exceeds `uniforms`.

    Returns:
        the columns int64 [rows, 1], and their log-probabilities float64 [rows, 1]: NaN if a logit was NaN or plus infinity.
    """
    # The largest is subtracted first: a large logit divided by a small temperature could overflow.
    scaled = legal.sub_(legal.amax(1, keepdim=True)).div_(temperatures.unsqueeze(1))
    reached = scaled.exp().cumsum_(1)
    total = reached[:, -1:]
    # The total is at least 1 and a number at most 1 - 2**-53, so their product is below the total, also rounded. So a column of
    # probability 0 is never sampled. Only without a total, which is NaN, a place may be beyond the last column.
    places = torch.searchsorted(reached, uniforms.unsqueeze(1) * total, right=True).clamp_(max=legal.shape[1] - 1)
    return places, scaled.gather(1, places) - total.log()


def _sample_open(logits: Tensor, uniforms: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """`_sample_places` for open sets: float32 [rows, n], n a multiple of `_BLOCK`; changes `logits`. Samples a block, then a
    column within it. Sums over blocks are in float32, all further ones in float64."""
    least = torch.finfo(torch.float32).tiny
    scaled = logits.sub_(logits.amax(1, keepdim=True)).div_(temperatures.float().clamp_(min=least).unsqueeze(1))
    weights = scaled.exp().view(len(logits), -1, _BLOCK)
    sums = weights.sum(2).double()
    reached = sums.cumsum(1)
    total = reached[:, -1:]
    wanted = uniforms.unsqueeze(1) * total
    blocks = torch.searchsorted(reached, wanted, right=True).clamp_(max=reached.shape[1] - 1)
    inner = weights.gather(1, blocks.unsqueeze(2).expand(-1, -1, _BLOCK)).squeeze(1).double().cumsum_(1)
    # Rounding may put the number outside its block: move it to the block's first or last column of positive probability.
    within = (wanted - reached.gather(1, blocks) + sums.gather(1, blocks)).clamp_(min=0)
    within = torch.minimum(within, torch.nextafter(inner[:, -1:], torch.zeros_like(total)))
    places = blocks * _BLOCK + torch.searchsorted(inner, within, right=True).clamp_(max=_BLOCK - 1)
    return places, scaled.gather(1, places).double() - total.log()
