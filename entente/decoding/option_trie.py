"""Builds the arrays of a legal table from the token sequences of its options, without a loop over tokens.

Sorted options of a root are its trie in depth-first order: each adds only the tokens after its prefix shared with the previous.
"""

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

from entente.decoding.legal_table import END
from entente.telemetry.errors import InputError


class TokenLines:
    """Token sequences as rows of one matrix, for vectorised gathers and comparisons. Append-only."""

    def __init__(self) -> None:
        self._count = 0
        self._ids = np.full((1024, 8), -1, np.int32)
        self._lengths = np.zeros(1024, np.int64)
        self._keys = np.zeros(1024, "S32")

    def add(self, sequences: Sequence[Sequence[int]]) -> range:
        """Append non-empty sequences; returns their rows."""
        lengths = np.array([len(ids) for ids in sequences])
        first, last = self._count, self._count + len(sequences)
        rows, width = self._ids.shape
        if last > rows or lengths.max() > width:
            self._grow(max(rows, 2 * last) if last > rows else rows, max(width, -(-int(lengths.max()) // 4) * 4))
        added = self._ids[first:last]
        added[np.arange(added.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(sequences), np.int32)
        self._lengths[first:last] = lengths
        # Byte strings compare in the order of their ids. Id 0 becomes 1, because numpy ignores zero bytes at the end.
        self._keys[first:last] = (added + 1).astype(">u4").view(self._keys.dtype)[:, 0]
        self._count = last
        return range(first, last)

    def _grow(self, rows: int, width: int) -> None:
        old, count = (self._ids, self._lengths, self._keys), self._count
        self._ids = np.full((rows, width), -1, np.int32)
        self._lengths, self._keys = np.zeros(rows, np.int64), np.zeros(rows, f"S{4 * width}")
        self._ids[:count, : old[0].shape[1]] = old[0][:count]
        self._lengths[:count], self._keys[:count] = old[1][:count], old[2][:count]

    def sorted(self, rows: np.ndarray, roots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sort options by root, then by ids. Returns the permutation, int64 [options], the sorted ids, int32 [options, width],
        padded with -1, and the sorted lengths, int64 [options]."""
        order = np.lexsort((self._keys[rows], roots))
        rows = rows[order]
        return order, self._ids[rows], self._lengths[rows]


def assemble(
    lines: TokenLines, rows: Sequence[int] | np.ndarray, roots: Sequence[int] | np.ndarray, following: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The automaton from all options. Node numbers rise along every path.

    Args:
        rows: [options] row of each option in `lines`.
        roots: [options] the root that it starts at: every number from 0 on, ascending.
        following: [options] the root that it leads to, a higher one, or END.

    Returns:
        offsets, token_ids, next_nodes, longest: as in `LegalTable`.

    Raises:
        InputError: an option of a root equals another or is a prefix of it.
    """
    root = np.asarray(roots)
    order, ids, lengths = lines.sorted(np.asarray(rows), root)
    target = np.asarray(following)[order]
    options, width = ids.shape
    is_first = np.empty(options, bool)
    is_first[0] = True
    np.not_equal(root[1:], root[:-1], out=is_first[1:])
    differs = ids[1:] != ids[:-1]
    shared = np.zeros(options, np.int64)
    shared[1:] = np.where(is_first[1:], 0, np.where(differs.any(1), differs.argmax(1), width))
    is_prefix = shared[1:] >= lengths[:-1]
    if is_prefix.any():
        at = int(is_prefix.argmax())
        before, option = (
            tuple(row[:length].tolist()) for row, length in zip(ids[at : at + 2], lengths[at : at + 2], strict=True)
        )
        raise InputError(f"option {before} equals option {option} or is a prefix of it: no end mark separates them")
    # An option adds a node after each of its own tokens but the last. A root comes before the nodes of its first option.
    added = lengths - 1 - shared
    first = np.cumsum(added + is_first) - added
    nodes = int(first[-1] + added[-1])
    root_nodes = first[is_first] - 1
    depth = np.arange(width)
    is_own = depth > shared[:, None]
    # The node before each token. An option's own nodes have higher numbers than those it shares with options before it.
    node = np.where(is_own, first[:, None] + depth - 1 - shared[:, None], 0)
    node[is_first, 0] = root_nodes
    np.maximum.accumulate(node, axis=0, out=node)
    is_edge = (depth >= shared[:, None]) & (depth < lengths[:, None])
    reached = np.empty_like(node)
    reached[:, :-1] = node[:, 1:]
    reached[np.arange(options), lengths - 1] = np.where(target == END, END, root_nodes[target])
    source = node[is_edge]
    by_source = np.argsort(source, kind="stable")
    offsets = np.zeros(nodes + 1, np.int32)
    np.cumsum(np.bincount(source, minlength=nodes), out=offsets[1:])
    longest = _longest(lengths, root, target, np.flatnonzero(is_first))
    return offsets, ids[is_edge][by_source], reached[is_edge].astype(np.int32)[by_source], longest


def _longest(lengths: np.ndarray, root: np.ndarray, target: np.ndarray, starts: np.ndarray) -> int:
    if (np.where(root == root[-1], END, root + 1) == target).all():  # each root leads to the next one alone
        return int(np.maximum.reduceat(lengths, starts).sum())
    longest = np.zeros(len(starts) + 1, np.int64)  # the last entry belongs to END
    for number, (start, end) in reversed(list(enumerate(pairwise((*starts.tolist(), len(root)))))):
        longest[number] = (lengths[start:end] + longest[target[start:end]]).max()
    return int(longest[0])
