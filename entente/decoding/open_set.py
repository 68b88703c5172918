"""Open sets: legal sets with all ids of the vocabulary except a few, stored as a few integers.

A thought token may be any id except those that end a completion, a list of 100,000 ids. The open set is `-1 - excluded`, `end`,
and any further excluded ids: every id from 0 to `end` - 1 except the excluded ones. Ids are never negative, so a negative first
integer marks an open set, and a row has as many thought tokens as its sets have negative integers.
"""

from collections.abc import Sequence

import numpy as np


def open_set(excluded: Sequence[int], end: int) -> np.ndarray:
    """All ids below `end` except those in `excluded`; int32 [1 + excluded ids]. Raises ValueError if `excluded` is empty, has
    duplicates, or has an id outside [0, `end`)."""
    first, *others = ids = sorted(set(excluded)) or [-1]
    if len(ids) != len(excluded) or not 0 <= first <= ids[-1] < end:
        raise ValueError(f"an open set excludes some of its {end} ids, not {list(excluded)}")
    return np.array([-1 - first, end, *others], np.int32)


def open_sets(legal_ids: np.ndarray, legal_offsets: np.ndarray) -> np.ndarray:
    """Which positions have an open set: bool [positions]. The arguments are columns of a row (`Decision`)."""
    return legal_ids[legal_offsets[:-1]] < 0


def set_size(legal: np.ndarray) -> int:
    return int(legal[1]) - len(legal) + 1 if legal[0] < 0 else len(legal)


def nth_id(legal: np.ndarray, number: int) -> int:
    """Id number `number`, from 0 in ascending order, of a listed or open set."""
    if legal[0] >= 0:
        return int(legal[number])
    for excluded in (-1 - int(legal[0]), *legal[2:].tolist()):
        number += number >= excluded
    return number


def excluded_ids(legal_ids: np.ndarray, begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The excluded ids of open sets, int64 [sets, most excluded ids]; padded with the first of each set. `begins`,
    `sizes` [sets]: start and length of each open set in `legal_ids`."""
    column = np.arange(int(sizes.max()) - 1 if len(sizes) else 1)
    place = np.where((column > 0) & (column < sizes[:, None] - 1), column + 1, 0)
    ids = legal_ids[begins[:, None] + place].astype(np.int64)
    return np.where(ids < 0, -1 - ids, ids)
