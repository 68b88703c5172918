"""The block structure of the tree mask, from the forest itself.

Token q sees token k exactly if k <= q < leave[k]. Let I be a block of queries that begins at b, and J an earlier block of keys,
all of `size` tokens. Then

    some token of I sees some token of J     if max(leave[J]) > b
    each token of I sees each token of J     if min(leave[J]) >= b + size

So two numbers for each block give the structure, and no array has tokens x tokens elements. A block always sees itself, and never
in full, because the mask is causal.
"""

import numpy as np


def tree_blocks(leaves: np.ndarray, positions: np.ndarray, window: int | None, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which blocks of keys each block of queries sees.

    Args:
        leaves: int [T], ends (exclusive) of each token and its descendants; T is a multiple of `size`.
        positions: int [T], depths in the trie.
        window: a token sees itself and the `window` - 1 positions above it; None: all above it.
        size: tokens of a block, at least 2.

    Returns:
        (partial, full), bool [blocks of queries, blocks of keys]: pairs of which some tokens see each other, and pairs of which
        all do. No pair is in both.
    """
    blocks = len(leaves) // size
    begins = np.arange(blocks) * size
    earlier = np.tri(blocks, k=-1, dtype=bool)
    ends = leaves.reshape(blocks, size)
    full = earlier & (ends.min(1)[None, :] >= begins[:, None] + size)
    if window is None:
        seen = earlier & (ends.max(1)[None, :] > begins[:, None])
    else:
        depths = positions.reshape(blocks, size)
        full &= depths.max(1)[:, None] - depths.min(1)[None, :] < window
        seen = _near(leaves, positions, window, size)
    return (seen | np.eye(blocks, dtype=bool)) & ~full, full


def _near(leaves: np.ndarray, positions: np.ndarray, window: int, size: int) -> np.ndarray:
    """bool [blocks, blocks]: whether an earlier block has a token that a block sees within the window.

    What a block sees before itself are ancestors of its first token. The tokens of the block that see such an ancestor are those
    before its leave, and the shallowest of them is the nearest. For each block this compares every earlier token once.
    """
    near = np.zeros((len(leaves) // size, len(leaves) // size), bool)
    for number, begin in enumerate(range(0, len(leaves), size)):
        above = np.flatnonzero(leaves[:begin] > begin)
        shallowest = np.minimum.accumulate(positions[begin : begin + size])
        last = np.minimum(leaves[above], begin + size) - begin - 1
        near[number, above[shallowest[last] - positions[above] < window] // size] = True
    return near
