"""The tables of all requests in an engine, side by side on its device, and where each request stands in its own.

The pure core of every vLLM logits processor: torch and nothing of vLLM. Tables lie end to end as one flat automaton, a request
is a slot, and a slot's state is one node. Walking and masking are a handful of tensor operations over the whole batch with
nothing read back, so that a GPU is never waited for. Tables go up once, however many requests share them; their room is taken
back when it is needed.

It never raises on a sampled token: a slot that left its table is free to end, and counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decoding.legal_table import END, LegalTable

FREE, LOST = 0, 1
"""The nodes of a slot that nothing constrains: it carries no table or is past its end, or it left its table."""
_TABLES = 2
"""The first node of the first table."""
_WIDTH = 1 << 32
"""An edge's key is its node times this plus its token; tokens are 32-bit numbers, so that none looks like another node's."""
_NEVER = torch.iinfo(torch.int64).max
LEAST_EDGES = 1 << 14
"""Room for so many edges at least: some hundred tables of a usual size."""


@dataclass(slots=True)
class _Placed:
    table: LegalTable
    users: int = 0
    root: int = 0
    """Its first node in the arena; 0 while it has no place."""


class LegalArena:
    """Slots, each under a legal table or free."""

    def __init__(self, slots: int, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._nodes = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._strays = torch.zeros((), dtype=torch.int64, device=self._device)
        """Of slots that have been given to others since."""
        self._slots: list[_Placed | None] = [None] * slots
        self._starts = [0] * slots
        self._placed: dict[int, _Placed] = {}
        self._new: list[_Placed] = []
        self._reset: set[int] = set()
        self._make_room([], edges=LEAST_EDGES)

    @property
    def strays(self) -> int:
        """Tokens sampled outside their table; must stay 0. Waits for the device."""
        return int(self._strays + (self._nodes == LOST).sum())

    def assign(self, slot: int, table: LegalTable | None, start: int = 0) -> None:
        """Slot `slot` now belongs to a request at node `start` of `table`, or to one without (None); `flush` makes it so."""
        before = self._slots[slot]
        if before is not None:
            before.users -= 1
        self._reset.add(slot)
        placed = None
        if table is not None:
            placed = self._placed.get(id(table))
            if placed is None:
                placed = self._placed[id(table)] = _Placed(table)
                self._new.append(placed)
            placed.users += 1
        self._slots[slot], self._starts[slot] = placed, start

    def flush(self) -> None:
        """Bring what was assigned to the device."""
        if self._new:
            self._place_new()
        if self._reset:
            slots = list(self._reset)
            held = [self._slots[slot] for slot in slots]
            at = self._upload(slots)
            self._strays += (self._nodes[at] == LOST).sum()
            starts = [self._starts[slot] for slot in slots]
            at_start = [FREE if placed is None else placed.root + start for placed, start in zip(held, starts, strict=True)]
            self._nodes[at] = self._upload(at_start)
            self._reset.clear()

    def put(self, slots: Sequence[int], nodes: Sequence[int | None]) -> None:
        """Slots, whose tables have been flushed, stand at these nodes of theirs now: END past the end, None if they left them."""
        held = (self._slots[slot] for slot in slots)
        stand = [
            LOST if node is None else FREE if node == END or placed is None else placed.root + node
            for placed, node in zip(held, nodes, strict=True)
        ]
        self._nodes[self._upload(slots)] = self._upload(stand)

    def advance(self, slots: Tensor, tokens: Tensor, moved: Tensor | None = None) -> None:
        """Slots `slots` int64 [n], each named once, go on by `tokens` int64 [n]; only where `moved` bool [n], if given."""
        nodes = self._nodes[slots]
        wanted = nodes * _WIDTH + tokens
        edges = torch.searchsorted(self._keys, wanted)
        # What is no edge of a free node leaves it free, and any other node lost.
        reached = torch.where(self._keys[edges] == wanted, self._targets[edges], nodes.clamp(max=LOST))
        self._nodes[slots] = reached if moved is None else torch.where(moved, reached, nodes)

    def mask(self, logits: Tensor, slots: Tensor) -> Tensor:
        """logits [rows, vocabulary], changed in place: -inf outside the legal set of each row's slot; slots int64 [rows]."""
        nodes = self._nodes[slots]
        # Every row names as many tokens as the widest node; a narrower one repeats its last, which is harmless.
        place = torch.minimum(self._up_to_widest, self._lasts[nodes].unsqueeze(1))
        tokens = self._tokens[self._firsts[nodes].unsqueeze(1) + place]
        legal = logits.gather(1, tokens)
        logits.masked_fill_((nodes >= _TABLES).unsqueeze(1), float("-inf"))
        return logits.scatter_(1, tokens, legal)

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

    def _make_room(self, live: Sequence[_Placed], *, edges: int) -> None:
        """New, larger or emptier, arrays that hold the `live` tables alone; slots keep their place in their table."""
        roots = [0 if placed is None else placed.root for placed in self._slots]
        # No table has more nodes than edges, so one bound serves both; a search may end on the key after the last.
        room = _TABLES + max(edges, LEAST_EDGES) + 1
        self._firsts, self._lasts, self._tokens, self._targets = (
            torch.zeros(room, dtype=torch.int64, device=self._device) for _ in range(4)
        )
        self._keys = torch.full((room,), _NEVER, dtype=torch.int64, device=self._device)
        # Nodes that constrain nothing keep the token at place 0, whatever it is, so that they need no case of their own.
        self._used_nodes, self._used_edges = _TABLES, 0
        self._widest, self._up_to_widest = 1, torch.zeros(1, dtype=torch.int64, device=self._device)
        self._append(live)
        moves = [(0 if placed is None else placed.root) - root for placed, root in zip(self._slots, roots, strict=True)]
        self._nodes += torch.where(self._nodes < _TABLES, 0, self._upload(moves))

    def _append(self, added: Sequence[_Placed]) -> None:
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
        # Sorted, because nodes rise through the arena and tokens rise within a node: one search finds any edge.
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

    def _upload(self, values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(self._device, non_blocking=True)
