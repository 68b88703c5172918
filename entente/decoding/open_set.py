"""Legal sets of thought tokens: every id of the vocabulary but one, written as two numbers.

A legal set is usually listed, id by id. A thought token may be any id except the one that ends the completion; listed, that
would be 100,000 ids. Such an open set is two numbers: `-1 - excluded` and `end`. It holds every id from 0 to `end` - 1 except
`excluded`. Ids are never negative, so a negative first number tells an open set from a list.
"""

import numpy as np


def open_set(excluded: int, end: int) -> np.ndarray:
    """The set of all ids below `end` except `excluded`; int32 [2].

    Raises:
        ValueError: `excluded` is not an id below `end`.
    """
    if not 0 <= excluded < end:
        raise ValueError(f"an open set excludes one of its {end} ids, not {excluded}")
    return np.array([-1 - excluded, end], np.int32)


def open_sets(legal_ids: np.ndarray, legal_offsets: np.ndarray) -> np.ndarray:
    """Which positions have an open set: bool [positions].

    Args:
        legal_ids: the sets of all positions, one position after another.
        legal_offsets: [positions + 1] the set of position i is legal_ids[legal_offsets[i]:legal_offsets[i + 1]].
    """
    return legal_ids[legal_offsets[:-1]] < 0


def set_size(legal: np.ndarray) -> int:
    """Number of ids in one legal set, listed or open."""
    return int(legal[1]) - 1 if legal[0] < 0 else len(legal)


def nth_id(legal: np.ndarray, number: int) -> int:
    """The id with this number, counted from 0 in rising order, of one legal set, listed or open."""
    if legal[0] >= 0:
        return int(legal[number])
    return number + (number >= -1 - int(legal[0]))


def excluded_ids(firsts: np.ndarray) -> np.ndarray:
    """The excluded id of each open set, from its first number."""
    return -1 - firsts
