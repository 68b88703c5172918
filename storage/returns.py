"""The return of each decision, from the stored reward components and a run's blend.

A pure function, like the rewards of packages. Equal components give equal bits, because the sums run backwards from a fork's
last decision. Spreads are computed in SQL and advantages in the trainer.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.rewards import reward_of
from storage.schema import COMPONENTS, FINAL, as_array

_Floats = npt.NDArray[np.float64]


def returns_of(decisions: pa.Table, weights: Mapping[str, float], discount: float) -> _Floats:
    """[rows] float64 returns of decision facts of whole start groups, in any order.

    The return of a decision is the sum of `discount ** k` times the blended components over it and the same power's later
    decisions in the fork, where k counts decisions from 0. Added to it are the undiscounted sums of the components with a
    `final_` weight.

    Args:
        decisions: decision facts (`facts.DECISION_FACTS`).
        weights: weight of each component; `final_` before a name means its undiscounted sum.
        discount: factor per later decision.
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
    """An order that puts the decisions of one power in one fork together, and for each the number of later ones."""
    shard = as_array(decisions["shard"]).dictionary_encode().indices.to_numpy()
    start_group = as_array(decisions["start_group"]).to_numpy()
    power = as_array(decisions["power"]).dictionary_encode().indices.to_numpy().astype(np.int64)
    fork, ply = (as_array(decisions[name]).to_numpy() for name in ("fork", "ply"))
    fork_and_power = (fork.astype(np.int64) << 32) + power
    order = np.lexsort((ply, fork_and_power, start_group, shard))
    ends = np.ones(len(order), bool)
    ends[:-1] = False
    for key in (fork_and_power, start_group, shard):
        ends[:-1] |= np.diff(key[order]) != 0
    lasts = np.flatnonzero(ends)
    return order, np.repeat(lasts, np.diff(lasts, prepend=-1)) - np.arange(len(order))


def _blended(decisions: pa.Table, weights: Mapping[str, float], prefix: str) -> _Floats:
    """[rows] weighted sum of the components: ours in the order of `COMPONENTS`, then those of packages by name."""
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
    """[rows] each value plus `discount` times the sum at the next row; computes all last rows first, then those before them."""
    if discount == 0:
        return values
    by_distance = np.argsort(to_last, kind="stable")
    rounds = np.split(by_distance, np.cumsum(np.bincount(to_last))[:-1])
    for rows in rounds[1:]:
        values[rows] += discount * values[rows + 1]
    return values
