"""A user's query gives each start position the weight with which it is drawn (`rollouts.sampling`).

The query is one SELECT over the table `positions` (`POSITIONS`): the state cache's positions to train on, with what past start
groups there returned. It returns `snapshot_id` and `weight`; a position that it leaves out has weight 0. The draw stays that of
`state_cache/sampling.py`. So a query cannot reach held-out positions, and a step that is repeated draws the same.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from game.snapshot import POWERS, Snapshot
from state_cache.strata import BALANCES, stratum_of
from telemetry.errors import InputError

if TYPE_CHECKING:
    from storage.learnable import PastGroups

POSITIONS = pa.schema(
    {
        "snapshot_id": pa.string(),
        "step": pa.int32(),
        "phase": pa.string(),
        "year": pa.int32(),
        "season": pa.string(),
        "phase_type": pa.string(),
        "balance": pa.string(),
        **{power.lower(): pa.int32() for power in POWERS},
        "source": pa.string(),
        "game_id": pa.string(),
        "start_groups": pa.int32(),
        "spread": pa.float64(),
        "mean_return": pa.float64(),
    }
)
"""Columns of `positions`; docs/data-format.md says what each holds."""
WEIGHT_MAX = 1e9
"""Largest weight; below 1 over it a weight counts as 0. So every draw can be computed."""


def list_positions(snapshots: Sequence[Snapshot], step: int, past: "Mapping[str, PastGroups]") -> pa.Table:
    """The table `positions` of a step.

    Args:
        past: the past start groups at each position, by snapshot id.
    """
    return pa.Table.from_pylist([_row(snapshot, step, past) for snapshot in snapshots], schema=POSITIONS)


def own_weights(query: str, positions: pa.Table, ask: Callable[..., list[tuple[Any, ...]]]) -> list[float]:
    """Weight of each row of `positions`, from 0 up.

    Args:
        ask: `storage.closed_query.ask_closed`, in whichever process.

    Raises:
        InputError: the query breaks a rule.
    """
    given: dict[str, float] = {}
    ids = positions["snapshot_id"].to_pylist()
    known = set(ids)
    for snapshot_id, weight in _ask(query, positions, ask):
        if snapshot_id not in known:
            raise InputError(
                f"rollouts.sampling returns snapshot '{snapshot_id}', which is no position to train on: take `positions` alone"
            )
        if snapshot_id in given:
            raise InputError(f"rollouts.sampling returns snapshot '{snapshot_id}' twice: return each once")
        given[snapshot_id] = _number(weight, snapshot_id)
    if not sum(given.values()):
        raise InputError("rollouts.sampling gives no position a weight above 0, so none can be drawn: let it keep some")
    return [given.get(snapshot_id, 0.0) for snapshot_id in ids]


def check_sampling(query: str) -> None:
    """Check that a query of `rollouts.sampling` can be run, over no positions.

    Raises:
        InputError: it cannot.
    """
    from storage.closed_query import ask_closed

    _ask(query, POSITIONS.empty_table(), ask_closed)


def _ask(query: str, positions: pa.Table, ask: Callable[..., list[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
    why = "the draw itself is the step's"
    return ask(query, setting="rollouts.sampling", name="positions", rows=positions, columns=("snapshot_id", "weight"), why=why)


def _number(weight: Any, snapshot_id: str) -> float:
    """Raises `InputError` unless the weight can be one."""
    try:
        number = float(weight)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= WEIGHT_MAX:
        raise InputError(
            f"rollouts.sampling gives snapshot '{snapshot_id}' the weight {weight}: give numbers from 0 to {WEIGHT_MAX:g}"
        )
    return number if number >= 1 / WEIGHT_MAX else 0.0


def _row(snapshot: Snapshot, step: int, past: "Mapping[str, PastGroups]") -> dict[str, Any]:
    found = past.get(snapshot.snapshot_id)
    return {
        "snapshot_id": snapshot.snapshot_id,
        "step": step,
        "phase": snapshot.phase,
        "year": snapshot.year,
        "season": snapshot.season,
        "phase_type": snapshot.phase_type,
        "balance": BALANCES[stratum_of(snapshot).balance][1],
        **{power.lower(): centres for power, centres in zip(POWERS, snapshot.centres, strict=True)},
        "source": snapshot.source,
        "game_id": snapshot.game_id,
        "start_groups": found.start_groups if found else 0,
        "spread": found.spread if found else None,
        "mean_return": found.mean_return if found else None,
    }
