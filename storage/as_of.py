"""What the trainer chose from at a past step.

The ledger of the step stores the query and the names of the shards within the staleness budget. An index over these shards and
the ledgers before chooses the recorded rows again, unless a shard was damaged or removed since.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from storage.arrow_files import metadata_of
from storage.index import Index, open_index
from storage.ledger import last_step, read_ledger
from storage.runs import RunPaths
from storage.selection import SelectionQuery
from telemetry.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class PastChoice:
    """What a step's ledger says about the choice of its rows."""

    query: SelectionQuery
    shards: tuple[str, ...]
    """Names of the shards that it was chosen from."""
    rows: pa.Table
    """The rows that the step trained on."""

    def open(self, paths: RunPaths, **how: Any) -> Index:
        """An index of what the step chose from; `how` as for `Index`."""
        return open_index(paths, only=self.shards, before_step=self.query.step, **how)


def read_past_choice(paths: RunPaths, step: int) -> PastChoice:
    """The choice of a past step.

    Raises:
        InputError: there is no such step, or its ledger was written by a version that did not store the query.
    """
    rows = read_ledger(paths, step)
    if rows is None:
        newest = last_step(paths)
        there = f"has steps 1 to {newest}" if newest else "has none yet"
        raise InputError(f"step {step} never was: run '{paths.root.name}' {there}")
    metadata = metadata_of(rows)
    if "selection" not in metadata:
        raise InputError(
            f"the ledger of step {step} of run '{paths.root.name}' does not say what its rows were chosen from: "
            "restore it from a copy"
        )
    return PastChoice(
        query=SelectionQuery.from_json(metadata["selection"]),
        shards=tuple(
            f"{producer}/{number:06d}.arrow" for producer, numbers in json.loads(metadata["shards"]).items() for number in numbers
        ),
        rows=rows,
    )


def next_query(paths: RunPaths) -> SelectionQuery:
    """The query of the next step, with the settings of the newest one."""
    step = last_step(paths)
    newest = read_ledger(paths, step)
    if newest is not None and "selection" in (metadata := metadata_of(newest)):
        return replace(SelectionQuery.from_json(metadata["selection"]), step=step + 1, policy_version=step)
    return SelectionQuery(step=step + 1, policy_version=step, max_policy_lag=2, start_groups=1, seed=0)
