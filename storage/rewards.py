"""The facts of a shard's rows, without tokens, and each decision's return from its reward components and a run's reward weights.

Facts are scalar values, the row's place (`shard`, `row`) and three token counts; lists and phase JSON stay in the mapped
files. A return depends only on its start group, so it is computed once. A user's reward is a pure function of one row's
components: it needs no new rollouts, and past selections can be repeated while the package is installed. Equal components give
equal bits, because the sums run backwards from a fork's last decision. Spreads are computed in SQL, advantages in the trainer.
"""

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from entente.telemetry.errors import InputError
from entente.telemetry.extensions import Misfit, check_arguments, check_named, load_part
from storage.arrow_files import COMPONENTS, DECISION_SCHEMA, FINAL, as_array

Components = Mapping[str, npt.NDArray[np.float64]]
"""Reward component -> its value in each row, float64 [rows]: the change until the power's next decision in the fork."""
Reward = Callable[[Components], npt.NDArray[np.float64]]
"""A function from the components of some rows to one value per row, float64 [rows]."""
_Floats = npt.NDArray[np.float64]

_ROWS = 8
_DECISION_FACTS = [f.name for f in DECISION_SCHEMA if not pa.types.is_list(f.type) and f.name != "prompt_len"]
_PHASE_FACTS = ["start_group", "fork", "phase_index", "phase", "snapshot_id"]


def _accept(function: Reward, named: str) -> Reward:
    if not callable(function):
        raise Misfit("it is not a function of row components")
    check_arguments(function, "components")

    def values_of(components: Components) -> _Floats:
        own = {name: values.copy() for name, values in components.items()}  # it may write into them
        return np.asarray(function(own), np.float64)

    tried = {name: np.sin(np.arange(1.0, _ROWS + 1) * place) for place, name in enumerate(COMPONENTS, start=1)}
    whole = values_of(tried)
    if whole.shape != (_ROWS,):
        raise Misfit(f"it returns values of shape {whole.shape} for {_ROWS} rows")
    alone = [values_of({name: values[[row]] for name, values in tried.items()}) for row in range(_ROWS)]
    if not np.array_equal(whole, np.concatenate(alone)):
        raise Misfit("a row's value depends on the other rows, or is not a number")

    def reward(components: Components) -> npt.NDArray[np.float64]:
        try:
            values = values_of(components)
        except Exception as error:
            raise InputError(f"the {named} failed ({type(error).__name__}: {error}): fix it") from error
        if values.shape != (rows := len(components[COMPONENTS[0]]),):
            raise InputError(f"the {named} returned values of shape {values.shape} for {rows} rows: fix it")
        if not np.isfinite(values).all():  # else the step would leave out these groups
            raise InputError(f"the {named} returned {values[~np.isfinite(values)][0]}, which is not a finite number: fix it")
        return values

    return reward


_OURS: Mapping[str, Reward] = {name: lambda components, name=name: components[name] for name in COMPONENTS}


@cache
def reward_of(name: str) -> Reward:
    """The function of a reward component, by its name without `final_`."""
    check_named("reward component", name, _OURS)
    return _OURS[name] if name in _OURS else load_part("reward component", name, _accept)


def check_reward_weights(weights: Mapping[str, float]) -> None:
    """Check the names, and try the user's rewards; raises InputError if a name is unknown or its component unusable."""
    for name in weights:
        try:
            reward_of(name.removeprefix(FINAL))
        except InputError as error:
            raise InputError(f"storage.reward_weights weighs {name}: {error}") from error


def decision_facts(decisions: pa.Table, shard: str, weights: Mapping[str, float], discount: float) -> pa.Table:
    """One row per decision of a shard; `n_branching` counts the positions with more than one legal token."""
    n_prompt = as_array(decisions["prompt_len"]).to_numpy()
    n_tokens = np.diff(as_array(decisions["input_ids"]).offsets.to_numpy())
    facts = {name: decisions[name] for name in _DECISION_FACTS}
    facts["power"] = decisions["power"].cast(pa.string())  # the dictionaries of shards differ, and one insert takes many shards
    counts = {"n_prompt": n_prompt, "n_completion": n_tokens - n_prompt, "n_branching": _branching(decisions)}
    return pa.table({**_places(shard, decisions), **facts, **counts, "return": returns_of(decisions, weights, discount)})


def phase_facts(phases: pa.Table, shard: str) -> pa.Table:
    return pa.table({**_places(shard, phases), **{name: phases[name] for name in _PHASE_FACTS}})


def _places(shard: str, rows: pa.Table) -> dict[str, pa.Array]:
    producer, _, _ = shard.partition("/")
    numbers = pa.array(np.arange(rows.num_rows, dtype=np.int32))
    return {"shard": pa.repeat(shard, rows.num_rows), "producer": pa.repeat(producer, rows.num_rows), "row": numbers}


def _branching(decisions: pa.Table) -> npt.NDArray[np.int32]:
    bounds = as_array(decisions["legal_offsets"])
    starts, values = bounds.offsets.to_numpy(), bounds.values.to_numpy()
    wide = np.zeros(len(values) + 1, np.int64)
    wide[1:-1] = np.diff(values) > 1
    total = np.cumsum(wide)
    # The first offset of a row follows the last one of another row: that difference is not a position and is left out.
    counts: npt.NDArray[np.int32] = (total[starts[1:] - 1] - total[starts[:-1]]).astype(np.int32)
    return counts


def returns_of(decisions: pa.Table, weights: Mapping[str, float], discount: float) -> _Floats:
    """[rows] float64 returns of the decisions of whole start groups, in any order.

    Sum of `discount ** k` times the weighted components over the decision and the same power's later ones in the fork (k counts
    decisions from 0), plus the undiscounted sums of the components with a `final_` weight.
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
    """An order that groups the decisions of one power in one fork, and for each the number of later ones."""
    start_group, fork, phase_index = (as_array(decisions[name]).to_numpy() for name in ("start_group", "fork", "phase_index"))
    power = as_array(decisions["power"]).dictionary_encode().indices.to_numpy().astype(np.int64)
    fork_and_power = (fork.astype(np.int64) << 32) + power
    order = np.lexsort((phase_index, fork_and_power, start_group))
    ends = np.ones(len(order), bool)
    ends[:-1] = (np.diff(fork_and_power[order]) != 0) | (np.diff(start_group[order]) != 0)
    lasts = np.flatnonzero(ends)
    return order, np.repeat(lasts, np.diff(lasts, prepend=-1)) - np.arange(len(order))


def _blended(decisions: pa.Table, weights: Mapping[str, float], prefix: str) -> _Floats:
    """[rows] weighted sum of the components: built-in ones in the order of `COMPONENTS`, then those of packages by name."""
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
