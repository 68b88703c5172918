"""A run as its trainer saw it when it chose the rows of a past step: what was published, what was used, what could be.

Promise: the step's ledger says what was looked at and how it was chosen from, so nothing is guessed; choosing again gives the
rows that it recorded, unless a shard was damaged since.
Never: change a run, or go back in an index that anybody else asks.
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
class StepThen:
    """What a step's ledger says of its choice."""

    lineage: str
    query: SelectionQuery
    seen: dict[str, list[list[int]]]
    """Producer -> [first start group, the one after the last] of each stretch that was looked at."""
    shortage: str
    """What was done about too few rows; empty if there were enough."""
    rows: pa.Table
    """What it trained on."""


def step_then(paths: RunPaths, step: int) -> StepThen:
    """The choice of a past step, in the lineage in which the run goes on or one that it was forked from.

    Raises:
        InputError: there is no such step, or its ledger is of a version that did not keep what it was chosen from.
    """
    lineage = lineage_at(paths, step)
    rows = read_ledger(paths, lineage, step)
    if rows is None:
        newest = max(recorded_steps(paths, lineage), default=0)
        there = f"has steps 1 to {newest}" if newest else "has none yet"
        raise InputError(f"step {step} never was: run '{paths.root.name}' {there}")
    told = metadata_of(rows)
    if "selection" not in told:
        raise InputError(
            f"the ledger of step {step} of run '{paths.root.name}' does not tell what it was chosen from: "
            "an older version wrote it"
        )
    return StepThen(
        lineage=lineage,
        query=SelectionQuery.of(told["selection"]),
        seen=json.loads(told["seen"]),
        shortage=told["shortage"],
        rows=rows,
    )


def go_back(index: Index, paths: RunPaths, then: StepThen) -> Selection:
    """Take from an index all that was not there, or not used, when the step was chosen, and choose again.

    The table ``standings`` has the standing of every advantage group from then on (see ``select_batch.sql``).
    """
    connection, counted = index.connection, counts_as_used(paths, then.lineage, before_step=then.query.step)
    stretches = [(producer, first, after) for producer, some in then.seen.items() for first, after in some]
    columns = zip(*stretches, strict=True) if stretches else ([], [], [])
    connection.register("seen", pa.table(dict(zip(("producer", "first", "after"), map(list, columns), strict=True)), _SEEN))
    for table in ("decisions", "advantage_groups", "plies"):
        connection.execute(
            f"DELETE FROM {table} AS t WHERE NOT EXISTS "
            "(FROM seen WHERE producer = t.producer AND t.start_group >= first AND t.start_group < after)"
        )
    for table in ("batches", "used_groups"):
        kept = " OR ".join("(lineage = ? AND step <= ?)" for _ in counted)
        connection.execute(f"DELETE FROM {table} WHERE NOT ({kept})", [value for pair in counted.items() for value in pair])
    connection.unregister("seen")
    return select(connection, then.query, counted)


def stand_now(index: Index, paths: RunPaths) -> None:
    """Make ``standings`` for the step that comes next, by the rule of the newest one."""
    lineage, step = current_lineage(paths), last_step(paths)
    query = SelectionQuery(step=step + 1, policy_version=step, max_policy_lag=2, start_groups=1, lineage=lineage, seed=0)
    newest = read_ledger(paths, lineage_at(paths, step), step)
    if newest is not None and "selection" in (told := metadata_of(newest)):
        query = replace(SelectionQuery.of(told["selection"]), step=step + 1, policy_version=step, lineage=lineage)
    make_standings(index.connection, query, counts_as_used(paths, lineage))


_SEEN = pa.schema({"producer": pa.string(), "first": pa.int64(), "after": pa.int64()})
