"""Legal sets of thought tokens: every id of the vocabulary but a few, written as a few numbers.

A legal set is usually listed, id by id. A thought token may be any id except those that end a completion; listed, that would be
100,000 ids. Such an open set is `-1 - excluded`, `end`, and further excluded ids, if there are any. It holds every id from 0 to
`end` - 1 except the excluded ones. Ids are never negative, so a negative first number tells an open set from a list, and a row
has as many thought tokens as its sets have negative numbers.
"""

from collections.abc import Sequence

import numpy as np


def open_set(excluded: Sequence[int], end: int) -> np.ndarray:
    """The set of all ids below `end` except those in `excluded`; int32 [1 + excluded ids].

    Raises:
        ValueError: `excluded` is empty, or does not name different ids below `end`.
    """
    first, *others = ids = sorted(set(excluded)) or [-1]
    if len(ids) != len(excluded) or not 0 <= first <= ids[-1] < end:
        raise ValueError(f"an open set excludes some of its {end} ids, not {list(excluded)}")
    return np.array([-1 - first, end, *others], np.int32)


def open_sets(legal_ids: np.ndarray, legal_offsets: np.ndarray) -> np.ndarray:
    """Which positions have an open set: bool [positions].

    Args:
        legal_ids: the sets of all positions, one position after another.
        legal_offsets: [positions + 1] the set of position i is legal_ids[legal_offsets[i]:legal_offsets[i + 1]].
    """
    return legal_ids[legal_offsets[:-1]] < 0


def set_size(legal: np.ndarray) -> int:
    """Number of ids in one legal set, listed or open."""
    return int(legal[1]) - len(legal) + 1 if legal[0] < 0 else len(legal)


def nth_id(legal: np.ndarray, number: int) -> int:
    """The id with this number, counted from 0 in rising order, of one legal set, listed or open."""
    if legal[0] >= 0:
        return int(legal[number])
    for excluded in (-1 - int(legal[0]), *legal[2:].tolist()):
        number += number >= excluded
    return number


def excluded_ids(legal_ids: np.ndarray, begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The excluded ids of open sets, int64 [sets, most excluded ids]; a set with fewer repeats its first.

    Args:
        legal_ids: sets, one after another.
        begins, sizes: [sets] where each open set begins in `legal_ids`, and its numbers.
    """
    column = np.arange(int(sizes.max()) - 1 if len(sizes) else 1)
    place = np.where((column > 0) & (column < sizes[:, None] - 1), column + 1, 0)
    ids = legal_ids[begins[:, None] + place].astype(np.int64)
    return np.where(ids < 0, -1 - ids, ids)
