"""Plans packed micro-batches: a token prefix that several decisions share is stored once.

The decisions of a batch are sorted by their tokens. Each then adds only the tokens after the prefix that it shares with the
decision before it. Concatenated, these tokens are the trie of the decisions in depth-first order; rules, board, power and
completions are shared wherever they are equal. The descendants of a token follow it directly, up to `leave`: token q sees token k
exactly if k <= q < leave[k].

- A micro-batch holds each token path once, and each decision completely.
- A micro-batch has at most the budget's tokens, unless it is one decision that is longer.
- A subtree that fits stays in one micro-batch; otherwise its prefix is repeated.
- Tokens from the last branching token of a decision on are left out: no prediction needs them.
- Equal rows give an equal plan.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from entente.training.branching import BranchingTokens, branching_fields, branching_indices, positions_of, ranges
from storage.gather import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicroBatch(BranchingTokens):
    """A forest of token paths in depth-first order, and their branching tokens.

    T: tokens; S: segments; H: tokens whose hidden state is needed; L: distinct legal ids; B, D, K and V as in `BranchingTokens`.
    A segment is a maximal run of tokens at which no path splits off.
    """

    input_ids: np.ndarray
    """int64 [T]."""
    positions: np.ndarray
    """int64 [T]: depth in the trie, which is the token's position in its decisions."""
    segment_starts: np.ndarray
    """int64 [S + 1]: first token of each segment; the last entry is T."""
    segment_leaves: np.ndarray
    """int64 [S]: end (exclusive) of the segment and its descendants."""
    hidden_at: np.ndarray
    """int64 [H], ascending: tokens whose hidden state predicts a branching token."""
    token_hidden: np.ndarray
    """int64 [B]: index into `hidden_at` for each branching token; decisions with an equal prefix share it."""
    head_ids: np.ndarray
    """int64 [L], ascending: ids that are legal for any order token; for order tokens only these rows of the head are computed."""
    legal_columns: np.ndarray
    """int64 [D, K]: index of each of `legal_ids` in `head_ids`."""

    @property
    def tokens(self) -> int:
        """Tokens that the forward computes."""
        return len(self.input_ids)

    @property
    def leaves(self) -> np.ndarray:
        """int64 [T]: end (exclusive) of each token and its descendants."""
        return np.repeat(self.segment_leaves, np.diff(self.segment_starts))


@dataclass(frozen=True, slots=True)
class _Paths:
    """The token paths of n decisions, sorted by their tokens. A path ends before the decision's last branching token."""

    rows: np.ndarray
    """int64 [n]: rows of the batch."""
    lengths: np.ndarray
    """int64 [n]: tokens of each path."""
    shared: np.ndarray
    """int64 [n]: length of the prefix shared with the path before; 0 for the first."""

    def part(self, places: np.ndarray) -> "_Paths":
        """The paths at `places`, which must ascend."""
        # Two paths share the smallest prefix that neighbours between them share. The ranges of reduceat end after each place.
        shared = np.minimum.reduceat(self.shared[: places[-1] + 1], np.concatenate([[0], places[:-1] + 1]))
        return _Paths(self.rows[places], self.lengths[places], shared)


def plan(batch: Batch, rows: Sequence[int] | np.ndarray, token_budget: int) -> tuple[PackedMicroBatch, ...]:
    """Pack `rows` of `batch` into micro-batches of at most `token_budget` tokens. Rows without a branching token are left out.

    Raises:
        ValueError: a drawn token is not in its own legal set.
    """
    paths = _sorted_paths(batch, np.asarray(rows, np.int64))
    return tuple(_micro_batch(batch, paths.part(places)) for places in _bins(paths, token_budget))


class UniqueTokens:
    """Counts the unique tokens of any of some rows, as one micro-batch without a budget would have them.

    Attributes:
        order: int64 [n]: index into the rows of each of the n rows with a branching token, in the order of the trie.
    """

    def __init__(self, batch: Batch, rows: np.ndarray) -> None:
        self._paths = _sorted_paths(batch, rows)
        by_row = np.argsort(rows, kind="stable")
        self.order = by_row[np.searchsorted(rows, self._paths.rows, sorter=by_row)]

    def of(self, which: np.ndarray) -> int:
        """Unique tokens of the rows where `which`, bool [rows], is True."""
        (places,) = which[self.order].nonzero()
        if not len(places):
            return 0
        part = self._paths.part(places)
        return int((part.lengths - part.shared).sum())


def _sorted_paths(batch: Batch, rows: np.ndarray) -> _Paths:
    index, place = branching_indices(batch, rows)
    last = np.full(len(rows), -1)
    last[place] = index  # the last assignment to a place is kept
    rows, last = rows[last >= 0], last[last >= 0]
    lengths = positions_of(batch, rows, last)
    starts = batch.input_offsets[rows]
    # Big-endian bytes compare in the order of the ids, and faster than lists of ids.
    id_bytes = batch.input_ids.astype(">u4").tobytes()
    bounds = zip((4 * starts).tolist(), (4 * (starts + lengths)).tolist(), strict=True)
    keys = [id_bytes[first:end] for first, end in bounds]
    order = np.array(sorted(range(len(rows)), key=keys.__getitem__), np.int64)
    rows, lengths, starts = rows[order], lengths[order], starts[order]
    return _Paths(rows, lengths, _shared(batch.input_ids, starts.tolist(), lengths.tolist()))


def _shared(ids: np.ndarray, starts: list[int], lengths: list[int]) -> np.ndarray:
    """Length of the longest common prefix of each path and the path before it, int64 [n]; 0 for the first."""
    shared = np.zeros(len(starts), np.int64)
    for place in range(1, len(starts)):
        length = min(lengths[place - 1], lengths[place])
        one, other = starts[place - 1], starts[place]
        differ = ids[one : one + length] != ids[other : other + length]
        first = int(differ.argmax()) if length else 0
        shared[place] = first if length and differ[first] else length
    return shared


def _bins(paths: _Paths, budget: int) -> list[np.ndarray]:
    """Places of the paths of each micro-batch. Whole subtrees are assigned by first-fit decreasing."""
    if len(paths.rows) == 0:
        return []
    fresh = np.concatenate([[0], np.cumsum(paths.lengths - paths.shared)])

    def tokens(low: int, high: int) -> int:
        return int(fresh[high] - fresh[low + 1] + paths.lengths[low])

    found_pieces = _pieces(paths.shared, 0, len(paths.rows), tokens, budget)
    pieces = sorted(((tokens(low, high), low, high) for low, high in found_pieces), key=lambda piece: (-piece[0], piece[1]))
    room: list[int] = []
    content: list[list[tuple[int, int]]] = []
    for size, low, high in pieces:
        found = next((number for number, left in enumerate(room) if size <= left), None)
        if found is None:
            found = len(room)
            room.append(budget)
            content.append([])
        room[found] -= size
        content[found].append((low, high))
    return [np.concatenate([np.arange(low, high) for low, high in sorted(runs)]) for runs in content]


def _pieces(shared: np.ndarray, low: int, high: int, tokens: Callable[[int, int], int], budget: int) -> Iterator[tuple[int, int]]:
    """Split the paths [low, high) into runs that fit the budget, at the branchings nearest the root; siblings stay together."""
    if high - low == 1 or tokens(low, high) <= budget:
        yield low, high
        return
    inner = shared[low + 1 : high]
    cuts = [low, *(low + 1 + np.flatnonzero(inner == inner.min())).tolist(), high]
    begin = low
    for first, end in pairwise(cuts):
        if tokens(begin, end) <= budget:
            continue
        if begin < first:
            yield begin, first
        begin = first
        if tokens(first, end) > budget:
            yield from _pieces(shared, first, end, tokens, budget)
            begin = end
    if begin < high:
        yield begin, high


def _micro_batch(batch: Batch, paths: _Paths) -> PackedMicroBatch:
    fresh = paths.lengths - paths.shared
    ends = np.cumsum(fresh)
    starts = ends - fresh
    total = int(ends[-1])
    segment_starts, segment_leaves = _segments(paths.shared.tolist(), paths.lengths.tolist(), starts.tolist(), total)
    index, place = branching_indices(batch, paths.rows)
    batch_row = paths.rows[place]
    fields = branching_fields(batch, batch_row, index)
    before = positions_of(batch, batch_row, index) - 1
    hidden_at, token_hidden = np.unique(_places(paths, starts, before, place), return_inverse=True)
    head_ids, legal_columns = np.unique(fields["legal_ids"], return_inverse=True)
    return PackedMicroBatch(
        **fields,
        input_ids=batch.input_ids[ranges(batch.input_offsets[paths.rows] + paths.shared, fresh)].astype(np.int64),
        positions=ranges(paths.shared, fresh),
        segment_starts=segment_starts,
        segment_leaves=segment_leaves,
        hidden_at=hidden_at,
        token_hidden=token_hidden,
        head_ids=head_ids,
        legal_columns=legal_columns.reshape(fields["legal_ids"].shape),
    )


def _segments(shared: list[int], lengths: list[int], starts: list[int], total: int) -> tuple[np.ndarray, np.ndarray]:
    """Segment starts and leaves of sorted paths whose own tokens (those not shared with the path before) begin at `starts`.

    The descendants of a token at depth d end where the next path begins that shares at most d tokens. The loop goes from the last
    path to the first. The stack holds (depth, place): tokens from this depth on have descendants up to this place. Each path
    splits its own tokens at these depths, and removes the entries that it hides from earlier paths.
    """
    stack = [(0, total)]
    segments: list[tuple[int, int]] = []
    for begin, depth, end in zip(reversed(starts), reversed(shared), reversed(lengths), strict=True):
        while end > depth:
            from_depth, leave = stack[-1]
            if from_depth < end:
                end = max(from_depth, depth)
                segments.append((begin + end - depth, leave))
            if from_depth > depth:
                stack.pop()
        while stack and stack[-1][0] >= depth:
            stack.pop()
        stack.append((depth, begin))
    segments.reverse()
    at, leaves = np.array(segments, np.int64).T
    # No path splits off where a path ends inside a longer one, so such segments are joined.
    kept = np.concatenate([[True], leaves[1:] != leaves[:-1]])
    return np.append(at[kept], total), leaves[kept]


def _places(paths: _Paths, starts: np.ndarray, depths: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Index of the token at each of `depths` in its path; `owner` is the number of the path, ascending.

    `trail` holds the token indices of the current path; the next path overwrites only what the two do not share.
    """
    trail = np.empty(int(paths.lengths.max()), np.int64)
    found = np.empty(len(depths), np.int64)
    bounds = np.searchsorted(owner, np.arange(len(paths.rows) + 1)).tolist()
    spans = zip(paths.shared.tolist(), paths.lengths.tolist(), starts.tolist(), strict=True)
    for number, (low, high, start) in enumerate(spans):
        trail[low:high] = np.arange(start, start + high - low)
        first, end = bounds[number], bounds[number + 1]
        found[first:end] = trail[depths[first:end]]
    return found
