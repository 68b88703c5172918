"""A run as its trainer saw it when it chose the rows of a past step.

The ledger of the step stores the query and the start groups that the index had read. Choosing again gives the recorded rows,
unless a shard was damaged since.
"""

import json
from dataclasses import dataclass, replace

import pyarrow as pa

from storage.arrow_files import metadata_of
from storage.index import Index
from storage.ledger import read_ledger, recorded_steps
from storage.lineages import counts_as_used, current_lineage, last_step, lineage_at
from storage.runs import RunPaths
from storage.selection import Selection, SelectionQuery, make_standings, select
from telemetry.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class PastChoice:
    """What a step's ledger says about the choice of its rows."""

    lineage: str
    query: SelectionQuery
    seen: dict[str, list[list[int]]]
    """Producer -> [first start group, one after the last] of each range that the index had read."""
    shortage: str
    """What was done because there were too few rows; empty if there were enough."""
    rows: pa.Table
    """The rows that the step trained on."""


def read_past_choice(paths: RunPaths, step: int) -> PastChoice:
    """The choice of a past step, in the current lineage or in one that it was forked from.

    Raises:
        InputError: there is no such step, or its ledger was written by a version that did not store the query.
    """
    lineage = lineage_at(paths, step)
    rows = read_ledger(paths, lineage, step)
    if rows is None:
        newest = max(recorded_steps(paths, lineage), default=0)
        there = f"has steps 1 to {newest}" if newest else "has none yet"
        raise InputError(f"step {step} never was: run '{paths.root.name}' {there}")
    metadata = metadata_of(rows)
    if "selection" not in metadata:
        raise InputError(
            f"the ledger of step {step} of run '{paths.root.name}' does not say what its rows were chosen from: "
            "restore it from a copy"
        )
    return PastChoice(
        lineage=lineage,
        query=SelectionQuery.from_json(metadata["selection"]),
        seen=json.loads(metadata["seen"]),
        shortage=metadata["shortage"],
        rows=rows,
    )


def rewind_index(index: Index, paths: RunPaths, then: PastChoice) -> Selection:
    """Choose the rows of a step again, from what there was then; see `rewind_tables`.

    The table `standings` then has the standing of every advantage group at that time (see `select_batch.sql`).
    """
    return select(index.connection, then.query, rewind_tables(index, paths, then))


def rewind_tables(index: Index, paths: RunPaths, then: PastChoice) -> dict[str, int]:
    """Delete from an index what was not published, or not used, when a step was chosen; returns the lineages that count as used.

    It changes the tables of `index`, so nothing else may use that index; earlier steps of the same history can follow.
    """
    connection, last_used = index.connection, counts_as_used(paths, then.lineage, before_step=then.query.step)
    spans = [(producer, first, after) for producer, ranges in then.seen.items() for first, after in ranges]
    columns = zip(*spans, strict=True) if spans else ([], [], [])
    connection.register("seen", pa.table(dict(zip(("producer", "first", "after"), map(list, columns), strict=True)), _SEEN))
    for table in ("decisions", "advantage_groups", "plies"):
        connection.execute(
            f"DELETE FROM {table} AS t WHERE NOT EXISTS "
            "(FROM seen WHERE producer = t.producer AND t.start_group >= first AND t.start_group < after)"
        )
    for table in ("batches", "used_groups"):
        kept = " OR ".join("(lineage = ? AND step <= ?)" for _ in last_used)
        connection.execute(f"DELETE FROM {table} WHERE NOT ({kept})", [value for pair in last_used.items() for value in pair])
    connection.unregister("seen")
    return last_used


def make_next_standings(index: Index, paths: RunPaths) -> None:
    """Make the table `standings` for the next step, with the settings of the newest one."""
    lineage, step = current_lineage(paths), last_step(paths)
    query = SelectionQuery(step=step + 1, policy_version=step, max_policy_lag=2, start_groups=1, lineage=lineage, seed=0)
    newest = read_ledger(paths, lineage_at(paths, step), step)
    if newest is not None and "selection" in (metadata := metadata_of(newest)):
        query = replace(SelectionQuery.from_json(metadata["selection"]), step=step + 1, policy_version=step, lineage=lineage)
    make_standings(index.connection, query, counts_as_used(paths, lineage))


_SEEN = pa.schema({"producer": pa.string(), "first": pa.int64(), "after": pa.int64()})
