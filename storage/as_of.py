"""A run as its trainer saw it when it chose the rows of a past step.

The ledger of the step stores the query and the start groups that the index had read. Choosing again gives the recorded rows,
unless a shard was damaged since.
"""

import json
from dataclasses import dataclass, replace

import pyarrow as pa

from storage.arrow_files import metadata_of
from storage.index import Index
from storage.ledger import last_step, read_ledger
from storage.runs import RunPaths
from storage.selection import Selection, SelectionQuery, make_standings, select
from telemetry.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class PastChoice:
    """What a step's ledger says about the choice of its rows."""

    query: SelectionQuery
    seen: dict[str, list[list[int]]]
    """Producer -> [first start group, one after the last] of each range that the index had read."""
    rows: pa.Table
    """The rows that the step trained on."""


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
        seen=json.loads(metadata["seen"]),
        rows=rows,
    )


def rewind_index(index: Index, then: PastChoice) -> Selection:
    """Choose the rows of a step again, from what there was then; see `rewind_tables`.

    The table `standings` then has the standing of every advantage group at that time (see `select_batch.sql`).
    """
    rewind_tables(index, then)
    return select(index.connection, then.query)


def rewind_tables(index: Index, then: PastChoice) -> None:
    """Delete from an index what was not published, or not used, when a step was chosen.

    It changes the tables of `index`, so nothing else may use that index; earlier steps of the same history can follow.
    """
    connection = index.connection
    spans = [(producer, first, after) for producer, ranges in then.seen.items() for first, after in ranges]
    columns = zip(*spans, strict=True) if spans else ([], [], [])
    connection.register("seen", pa.table(dict(zip(("producer", "first", "after"), map(list, columns), strict=True)), _SEEN))
    for table in ("decisions", "advantage_groups", "plies"):
        connection.execute(
            f"DELETE FROM {table} AS t WHERE NOT EXISTS "
            "(FROM seen WHERE producer = t.producer AND t.start_group >= first AND t.start_group < after)"
        )
    for table in ("batches", "used_groups"):
        connection.execute(f"DELETE FROM {table} WHERE step >= ?", [then.query.step])
    connection.unregister("seen")


def make_next_standings(index: Index, paths: RunPaths) -> None:
    """Make the table `standings` for the next step, with the settings of the newest one."""
    step = last_step(paths)
    query = SelectionQuery(step=step + 1, policy_version=step, max_policy_lag=2, start_groups=1, seed=0)
    newest = read_ledger(paths, step)
    if newest is not None and "selection" in (metadata := metadata_of(newest)):
        query = replace(SelectionQuery.from_json(metadata["selection"]), step=step + 1, policy_version=step)
    make_standings(index.connection, query)


_SEEN = pa.schema({"producer": pa.string(), "first": pa.int64(), "after": pa.int64()})
