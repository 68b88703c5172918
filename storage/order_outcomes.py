"""What kind each order of chosen decisions is and whether it had an effect, from the phases of their shards."""

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from storage.arrow_files import as_array
from storage.shards import open_phases, open_shard

_KINDS = {"H": 0, "-": 1, "S": 2, "C": 3}
"""Third word of an order -> place in `entente.telemetry.metrics.ORDER_KINDS`."""
NO_KIND = -1
"""Of a build, disband or retreat."""


def order_outcomes(rows: pa.Table, shards: Path) -> Mapping[int, list[int]]:
    """Decision id -> for each of its orders twice the kind, plus 1 if a result of the adjudicator says that it failed; or
    NO_KIND. Decisions without a recorded phase are left out. Raises DataError if a shard or its phases are damaged.

    `rows`: of a selection or ledger; `shards`: the run's folder of that name."""
    outcomes: dict[int, list[int]] = {}
    names, places = rows["shard"].to_pylist(), rows["row"].to_pylist()
    for name in dict.fromkeys(names):
        decisions = open_shard(shards / name)
        phases = open_phases(shards / name, decisions)
        results, keys = phases["results"], ("start_group", "fork", "phase_index")
        found = {key: place for place, key in enumerate(zip(*(phases[key].to_pylist() for key in keys), strict=True))}
        chosen = decisions.take(pa.array([place for each, place in zip(names, places, strict=True) if each == name]))
        columns = (as_array(chosen[column]).to_pylist() for column in (*keys, "decision_id", "orders"))
        for group, fork, index, decision, orders in zip(*columns, strict=True):
            if (place := found.get((group, fork, index))) is not None:
                outcomes[decision] = [_outcome(order.split(), json.loads(results[place].as_py())) for order in orders]
    return outcomes


def _outcome(words: list[str], results: Mapping[str, list[str]]) -> int:
    kind = _KINDS.get(words[2] if len(words) > 2 else "", NO_KIND)
    return kind if kind == NO_KIND else 2 * kind + bool(results.get(" ".join(words[:2])))
