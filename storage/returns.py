"""What a decision is worth: the return of each, from the stored reward components and a run's blend.

Promise: pure, as a reward of a package must be; and to the last bit the same for equal outcomes, as the sums run from a fork's
last decision backwards.
Never: read a file, or compare decisions with one another (that is the groups' SQL and, for advantages, the trainer).
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.rewards import reward_of
from storage.schema import COMPONENTS, FINAL, as_array

_Floats = npt.NDArray[np.float64]


def returns_of(decisions: pa.Table, weights: Mapping[str, float], discount: float) -> _Floats:
    """[rows] returns of decision facts that come in whole start groups, in any order.

    A decision's return is the sum over it and the same power's later decisions in its fork of ``discount ** k`` times their
    blended components, ``k`` being how many decisions later each was made, plus the undiscounted sum of their components by the
    weights of sums to the fork's end (``final_`` before the name).
    """
    if decisions.num_rows == 0:
        return np.empty(0)
    order, to_last = _forks_in_order(decisions)
    total = _summed(_blended(decisions, weights, "")[order], to_last, discount)
    if any(weight and name.startswith(FINAL) for name, weight in weights.items()):
        total += _summed(_blended(decisions, weights, FINAL)[order], to_last, 1.0)
    returns = np.empty(len(order))
    returns[order] = total
    return returns


def _forks_in_order(decisions: pa.Table) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """An order in which the decisions of one power in one fork follow one another, and how many of them come after each."""
    shard = as_array(decisions["shard"]).dictionary_encode().indices.to_numpy()
    start_group = as_array(decisions["start_group"]).to_numpy()
    power = as_array(decisions["power"]).dictionary_encode().indices.to_numpy().astype(np.int64)
    fork, ply = (as_array(decisions[name]).to_numpy() for name in ("fork", "ply"))
    whose = (fork.astype(np.int64) << 32) + power  # of a start group's rows
    order = np.lexsort((ply, whose, start_group, shard))
    ends = np.ones(len(order), bool)
    ends[:-1] = False
    for key in (whose, start_group, shard):
        ends[:-1] |= np.diff(key[order]) != 0
    lasts = np.flatnonzero(ends)
    return order, np.repeat(lasts, np.diff(lasts, prepend=-1)) - np.arange(len(order))


def _blended(decisions: pa.Table, weights: Mapping[str, float], prefix: str) -> _Floats:
    """[rows] components times their weights, added up in the order of ``COMPONENTS``, then those of packages by name."""
    total = np.zeros(decisions.num_rows)
    outside = sorted({name.removeprefix(FINAL) for name in weights} - set(COMPONENTS))
    columns = {
        name: as_array(decisions[name]).to_numpy().astype(np.float64)
        for name in COMPONENTS
        if outside or weights.get(prefix + name)
    }
    for name in (*COMPONENTS, *outside):
        if weight := weights.get(prefix + name, 0.0):
            total += weight * reward_of(name)(columns)
    return total


def _summed(values: _Floats, to_last: npt.NDArray[np.int64], discount: float) -> _Floats:
    """[rows] each value plus ``discount`` times the sum of the one after it; all last ones first, then all before those."""
    if discount == 0:
        return values
    by_distance = np.argsort(to_last, kind="stable")
    rounds = np.split(by_distance, np.cumsum(np.bincount(to_last))[:-1])
    for rows in rounds[1:]:
        values[rows] += discount * values[rows + 1]
    return values
