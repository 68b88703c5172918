"""From decisions to packed micro-batches: every token path that decisions share is laid out once.

The decisions of a batch are sorted by their tokens. In that order each decision needs only the tokens after what it shares with
the one before it, so laying these down one after another writes their trie in depth-first order: rules, board, power and answers
are shared on whatever levels they are equal, without anyone naming the levels. The tokens below a token then stand right behind
it, up to `leave`: token q sees token k exactly if k <= q < leave[k].

Promise: within a micro-batch no token path stands twice; a decision lies whole in one micro-batch; a micro-batch holds no more
than the budget of tokens, unless it is a single decision longer than that; subtrees stay together where they fit, else their
prefix is repeated. Tokens behind the last one that a branching token needs are left out. Same rows, same plan.
Never: look at a return, or touch a tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from storage.gather import Batch
from training.branching import BranchingTokens, branching_fields, branching_indices, positions_of, ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicroBatch(BranchingTokens):
    """A forest of token paths in depth-first order, and the branching tokens that hang on it. T tokens, S segments,
    H places with a wanted hidden state, V distinct legal ids; B and K as in `BranchingTokens`.

    A segment is a maximal run of tokens without a branching in it.
    """

    input_ids: np.ndarray
    """int64 [T]."""
    positions: np.ndarray
    """int64 [T]: depth in the trie, which is the position in each decision that passes through."""
    segment_starts: np.ndarray
    """int64 [S + 1]: where each segment begins; the last entry is T."""
    segment_leaves: np.ndarray
    """int64 [S]: end of the tokens below the segment, itself included."""
    hidden_at: np.ndarray
    """int64 [H], ascending: tokens whose hidden state predicts a branching token."""
    token_hidden: np.ndarray
    """int64 [B]: which of `hidden_at` predicts each branching token; decisions that drew alike share it."""
    head_ids: np.ndarray
    """int64 [V], ascending: the ids that are legal anywhere here; only their rows of the head are needed."""
    legal_columns: np.ndarray
    """int64 [B, K]: place of each of `legal_ids` in `head_ids`."""

    @property
    def tokens(self) -> int:
        """Tokens that the forward computes."""
        return len(self.input_ids)

    @property
    def leaves(self) -> np.ndarray:
        """int64 [T]: per token, the end of the tokens below it, itself included."""
        return np.repeat(self.segment_leaves, np.diff(self.segment_starts))


@dataclass(frozen=True, slots=True, kw_only=True)
class TriePlan:
    """The micro-batches of an update, and what they save."""

    micro_batches: tuple[PackedMicroBatch, ...]
    raw_tokens: int
    """Tokens of all the rows, prompts and completions."""
    unique_tokens: int
    """Tokens that are laid out, over all micro-batches."""
    branching_tokens: int
    """Branching tokens of all the rows."""


@dataclass(frozen=True, slots=True)
class _Paths:
    """The needed tokens of decisions, sorted; n decisions."""

    rows: np.ndarray
    """int64 [n] rows of the batch."""
    lengths: np.ndarray
    """int64 [n] tokens needed of each: those before its last branching token."""
    shared: np.ndarray
    """int64 [n] tokens that each has in common with the one before; 0 for the first."""

    def part(self, places: np.ndarray) -> "_Paths":
        """Some of them, `places` ascending: what two have in common is the least that any two between them have."""
        # Each range of reduceat runs on to the next one's start, which is just behind the place it is for.
        shared = np.minimum.reduceat(self.shared[: places[-1] + 1], np.concatenate([[0], places[:-1] + 1]))
        return _Paths(self.rows[places], self.lengths[places], shared)


def plan(batch: Batch, rows: Sequence[int] | np.ndarray, token_budget: int) -> TriePlan:
    """Pack `rows` of `batch` into micro-batches of at most `token_budget` tokens. Rows without a branching token need no forward.

    Raises:
        ValueError: a drawn token is not in its own legal set.
    """
    chosen = np.asarray(rows, np.int64)
    paths = _sorted_paths(batch, chosen)
    micro_batches = tuple(_micro_batch(batch, paths.part(places)) for places in _bins(paths, token_budget))
    return TriePlan(
        micro_batches=micro_batches,
        raw_tokens=int((batch.input_offsets[chosen + 1] - batch.input_offsets[chosen]).sum()),
        unique_tokens=sum(len(micro.input_ids) for micro in micro_batches),
        branching_tokens=sum(len(micro.batch_row) for micro in micro_batches),
    )


def _sorted_paths(batch: Batch, rows: np.ndarray) -> _Paths:
    index, place = branching_indices(batch, rows)
    last = np.full(len(rows), -1)
    last[place] = index  # of several, the last one stays
    rows, last = rows[last >= 0], last[last >= 0]
    lengths = positions_of(batch, rows, last)
    starts = batch.input_offsets[rows]
    # As bytes, highest first, ids compare like numbers, many at a time.
    everything = batch.input_ids.astype(">u4").tobytes()
    bounds = zip((4 * starts).tolist(), (4 * (starts + lengths)).tolist(), strict=True)
    keys = [everything[first:end] for first, end in bounds]
    order = np.array(sorted(range(len(rows)), key=keys.__getitem__), np.int64)
    rows, lengths, starts = rows[order], lengths[order], starts[order]
    return _Paths(rows, lengths, _shared(batch.input_ids, starts.tolist(), lengths.tolist()))


def _shared(ids: np.ndarray, starts: list[int], lengths: list[int]) -> np.ndarray:
    """Length of the longest common prefix of each path and the one before it; 0 for the first."""
    shared = np.zeros(len(starts), np.int64)
    for place in range(1, len(starts)):
        length = min(lengths[place - 1], lengths[place])
        one, other = starts[place - 1], starts[place]
        differ = ids[one : one + length] != ids[other : other + length]
        first = int(differ.argmax()) if length else 0
        shared[place] = first if length and differ[first] else length
    return shared


def _bins(paths: _Paths, budget: int) -> list[np.ndarray]:
    """Places of the paths that go into each micro-batch: whole subtrees first-fit, the largest first."""
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
    """Cut the paths [low, high) at the branchings nearest to the root into runs that fit; runs of siblings stay together."""
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
    """Segment starts and leaves of sorted paths whose fresh tokens begin at `starts`.

    A token at depth d is left where the next path begins that shares no more than d. From the last path to the first, a stack
    holds the paths at which deeper tokens than before are left; each path cuts its fresh tokens by those, and drops the ones that
    hide behind it.
    """
    stack = [(0, total)]  # from this depth on, tokens are left at this place
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
    # A path that ends inside a longer one is no branching.
    kept = np.concatenate([[True], leaves[1:] != leaves[:-1]])
    return np.append(at[kept], total), leaves[kept]


def _places(paths: _Paths, starts: np.ndarray, depths: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Where the token at each depth of its path lies; `owner`: the path, ascending.

    One row of places is written over, path by path: what two neighbours share stays.
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
