"""Plans micro-batches of an update: a token prefix that several decisions share is stored once.

The decisions of a batch are sorted by their tokens. Each then adds only the tokens after the prefix that it shares with the
decision before it. Concatenated, these tokens are the trie of the decisions in depth-first order; rules, board, power and
completions are shared wherever they are equal. The descendants of a token follow it directly, up to `leave`: token q sees token k
exactly if k <= q < leave[k].

- A micro-batch holds each token path once, and each decision completely.
- A micro-batch has at most the budget's tokens, unless it is a single longer decision.
- A subtree that fits stays in one micro-batch; otherwise its prefix is repeated.
- Tokens from the last branching token of a decision on are left out: no prediction needs them.
- Equal rows give an equal plan.

A token is branching if its legal set holds more than one id; the loss is a sum over these tokens. A forced token has probability
1 under any weights, so it has no loss and no gradient. The legal set of an order token is a list of ids, that of a thought token
an open set (entente/decoding/open_set.py), whose ids are never listed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from entente.decoding.open_set import excluded_ids
from storage.gather import Batch

PROBED_SHARE = 1 / 8
"""Share of branching order tokens whose legal mass is computed."""
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A forest of token paths in depth-first order, and their branching tokens.

    T: tokens; S: segments, maximal runs of tokens at which no path splits off; H: tokens whose hidden state is needed; L:
    distinct legal ids. B: branching tokens, of which D are order tokens, whose largest legal set has K ids, and E thought tokens.
    A branching token is listed once per decision that sampled it. Order tokens and thought tokens each keep the order of the B
    tokens.
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
    batch_row: np.ndarray
    """int64 [B]: row in the whole batch. The tokens of a row are adjacent and in order."""
    completion_index: np.ndarray
    """int64 [B]: index into the completion positions of the whole batch."""
    in_thought: np.ndarray
    """bool [B]: True for thought tokens."""
    behaviour: np.ndarray
    """float32 [B]: behaviour logprob, nats."""
    temperature: np.ndarray
    """float32 [B]."""
    legal_ids: np.ndarray
    """int64 [D, K]: the legal set. Padding repeats its first id."""
    legal_mask: np.ndarray
    """bool [D, K]: False for padding."""
    chosen: np.ndarray
    """int64 [D]: column of the sampled token in `legal_ids`."""
    head_ids: np.ndarray
    """int64 [L], ascending: ids that are legal for any order token; for order tokens only these rows of the head are computed."""
    legal_columns: np.ndarray
    """int64 [D, K]: index of each of `legal_ids` in `head_ids`."""
    thought_ids: np.ndarray
    """int64 [E]: the sampled ids of the thought tokens."""
    excluded: np.ndarray
    """int64 [E, X]: the ids that its open set leaves out. Padding repeats its first."""
    end: np.ndarray
    """int64 [E]: the end of its open set."""

    @property
    def tokens(self) -> int:
        return len(self.input_ids)

    @property
    def leaves(self) -> np.ndarray:
        """int64 [T]: end (exclusive) of each token and its descendants."""
        return np.repeat(self.segment_leaves, np.diff(self.segment_starts))

    @property
    def has_thought(self) -> bool:
        return len(self.thought_ids) > 0


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
        # Two paths share the smallest prefix that neighbours between them share. The ranges of reduceat end after each place.
        shared = np.minimum.reduceat(self.shared[: places[-1] + 1], np.concatenate([[0], places[:-1] + 1]))
        return _Paths(self.rows[places], self.lengths[places], shared)


def plan(batch: Batch, rows: Sequence[int] | np.ndarray, token_budget: int) -> tuple[MicroBatch, ...]:
    """Pack `rows` of `batch` into micro-batches of at most `token_budget` tokens; rows without a branching token are left out.
    Raises ValueError if a sampled token is not in its own legal set."""
    paths = _sorted_paths(batch, np.asarray(rows, np.int64))
    return tuple(_micro_batch(batch, paths.part(places)) for places in _bins(paths, token_budget))


class UniqueTokens:
    """Counts the unique tokens of subsets of rows, as one micro-batch without a budget would hold them.

    Attributes:
        order: int64 [n]: the rows that have a branching token, as indices into the rows, in trie order.
    """

    def __init__(self, batch: Batch, rows: np.ndarray) -> None:
        self._paths = _sorted_paths(batch, rows)
        by_row = np.argsort(rows, kind="stable")
        self.order = by_row[np.searchsorted(rows, self._paths.rows, sorter=by_row)]

    def of(self, which: np.ndarray) -> int:
        """`which`: bool [rows]."""
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
    if len(paths.rows) == 0:
        return []
    fresh = np.concatenate([[0], np.cumsum(paths.lengths - paths.shared)])

    def tokens(low: int, high: int) -> int:
        return int(fresh[high] - fresh[low + 1] + paths.lengths[low])

    runs_of_paths = _pieces(paths.shared, 0, len(paths.rows), tokens, budget)
    pieces = sorted(((tokens(low, high), low, high) for low, high in runs_of_paths), key=lambda piece: (-piece[0], piece[1]))
    room: list[int] = []
    content: list[list[tuple[int, int]]] = []
    for size, low, high in pieces:
        target = next((number for number, left in enumerate(room) if size <= left), None)
        if target is None:
            target = len(room)
            room.append(budget)
            content.append([])
        room[target] -= size
        content[target].append((low, high))
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


def _micro_batch(batch: Batch, paths: _Paths) -> MicroBatch:
    fresh = paths.lengths - paths.shared
    ends = np.cumsum(fresh)
    starts = ends - fresh
    total = int(ends[-1])
    segment_starts, segment_leaves = _segments(paths.shared.tolist(), paths.lengths.tolist(), starts.tolist(), total)
    index, place = branching_indices(batch, paths.rows)
    batch_row = paths.rows[place]
    fields = _token_fields(batch, batch_row, index)
    before = positions_of(batch, batch_row, index) - 1
    hidden_at, token_hidden = np.unique(_places(paths, starts, before, place), return_inverse=True)
    head_ids, legal_columns = np.unique(fields["legal_ids"], return_inverse=True)
    return MicroBatch(
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
    places = np.empty(len(depths), np.int64)
    bounds = np.searchsorted(owner, np.arange(len(paths.rows) + 1)).tolist()
    spans = zip(paths.shared.tolist(), paths.lengths.tolist(), starts.tolist(), strict=True)
    for number, (low, high, start) in enumerate(spans):
        trail[low:high] = np.arange(start, start + high - low)
        first, end = bounds[number], bounds[number + 1]
        places[first:end] = trail[depths[first:end]]
    return places


# -- branching tokens ------------------------------------------------------------------------------------------------------


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The integers of the ranges [start, start + length), concatenated."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def in_thought(batch: Batch, completion_index: np.ndarray) -> np.ndarray:
    """bool [tokens]: which of these branching tokens are thought tokens."""
    return batch.legal_ids[batch.legal_offsets[completion_index]] < 0


def branching_indices(batch: Batch, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The branching tokens of `rows`, in the order of the rows: completion index, int64 [B], and index into `rows`, int64 [B]."""
    starts = batch.completion_offsets[rows]
    lengths = batch.completion_offsets[rows + 1] - starts
    index = ranges(starts, lengths)
    place = np.repeat(np.arange(len(rows)), lengths)
    branching = batch.legal_offsets[index + 1] - batch.legal_offsets[index] > 1
    return index[branching], place[branching]


def positions_of(batch: Batch, batch_row: np.ndarray, completion_index: np.ndarray) -> np.ndarray:
    """Position of each completion token in its row, counted from the start of the prompt; int64 [B]."""
    return batch.prompt_lens[batch_row] + completion_index - batch.completion_offsets[batch_row]


def _token_fields(batch: Batch, batch_row: np.ndarray, completion_index: np.ndarray) -> dict[str, np.ndarray]:
    thought = in_thought(batch, completion_index)
    first = batch.legal_offsets[completion_index]
    sizes = (batch.legal_offsets[completion_index + 1] - first)[~thought]
    column = np.arange(int(sizes.max()) if len(sizes) else 1)
    legal_mask = column[None, :] < sizes[:, None]
    legal_ids = batch.legal_ids[first[~thought, None] + np.where(legal_mask, column[None, :], 0)].astype(np.int64)
    sampled = batch.input_ids[batch.input_offsets[batch_row] + positions_of(batch, batch_row, completion_index)]
    open_sizes = (batch.legal_offsets[completion_index + 1] - first)[thought]
    excluded = excluded_ids(batch.legal_ids, first[thought], open_sizes)
    end = batch.legal_ids[first[thought] + 1].astype(np.int64)
    thought_ids = sampled[thought].astype(np.int64)
    if outside := int(((thought_ids[:, None] == excluded).any(1) | (thought_ids >= end)).sum()):
        raise ValueError(f"{outside} sampled tokens are not in their own open sets")
    return {
        "batch_row": batch_row,
        "completion_index": completion_index,
        "in_thought": thought,
        "legal_ids": legal_ids,
        "legal_mask": legal_mask,
        "chosen": _column_of(sampled[~thought], legal_ids, legal_mask),
        "thought_ids": thought_ids,
        "excluded": excluded,
        "end": end,
        "behaviour": batch.behaviour_logprobs[completion_index].astype(np.float32),
        "temperature": batch.temperatures[batch_row].astype(np.float32),
    }


def _column_of(sampled: np.ndarray, legal_ids: np.ndarray, legal_mask: np.ndarray) -> np.ndarray:
    """Column of each sampled token in `legal_ids`, int64 [B]."""
    hit = (legal_ids == sampled[:, None]) & legal_mask
    if not hit.any(axis=1).all():
        raise ValueError(f"{int((~hit.any(axis=1)).sum())} sampled tokens are not in their own legal sets")
    return hit.argmax(axis=1)


def probed(completion_index: np.ndarray) -> np.ndarray:
    """bool [positions]: which completion positions are probed for their legal mass, which needs the logits of the whole
    vocabulary.

    Token c is if frac(c * golden ratio) < 1 / 8: multiples of the golden ratio are spread evenly (Weyl), and the choice
    depends only on the token's place in the batch, not on how an update is split.
    """
    return np.mod(np.asarray(completion_index, np.float64) * _GOLDEN, 1.0) < PROBED_SHARE
