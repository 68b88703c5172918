"""The ledger: which rows a trainer step used, written before the forward pass of that step.

`ledger/step-000137.arrow` is written once, by one trainer. A trainer that finds the name taken is not alone on the
run and must stop. A step is repeated by reading its ledger, never by selecting again. A file counts only under the name that it
was written for. Counts over a run come from its ledgers and the metadata of its shards. Nothing here loads DuckDB.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from entente.telemetry.errors import DataError
from storage.arrow_files import map_arrow, metadata_of, write_arrow
from storage.files import names_in
from storage.runs import RunPaths, numbers_in
from storage.shards import readable_shards

STEP_NAME = re.compile(r"step-(\d{6,})\.arrow")
ROWS_SCHEMA = pa.schema(  # a chosen row: its place, its identity, and its lag, return and advantage group
    {
        "shard": pa.string(),
        "row": pa.int32(),
        "decision_id": pa.int64(),
        "start_group": pa.int64(),
        "fork": pa.int16(),
        "ply": pa.int16(),
        "power": pa.string(),
        "phase": pa.string(),
        "policy_version": pa.int32(),
        "policy_lag": pa.int32(),
        "checksum": pa.uint32(),
        "return": pa.float64(),
        "advantage_group": pa.int32(),
    }
)

_CURE = "resume the run, which restores it from a checkpoint, or restore it from a copy."


def ledger_path(paths: RunPaths, step: int) -> Path:
    return paths.ledger / f"step-{step:06d}.arrow"


def write_ledger(paths: RunPaths, step: int, rows_table: pa.Table, metadata: Mapping[str, str]) -> bool:
    """Record the rows of `step` in their order, with their metadata and these; False if another trainer did so before.

    Raises:
        DataError: `rows_table` lacks a column of `ROWS_SCHEMA`, so the step could not be repeated.
    """
    path = ledger_path(paths, step)
    if missing := [name for name in ROWS_SCHEMA.names if name not in rows_table.column_names]:
        raise DataError(f"{path} cannot be written without {', '.join(missing)}; give the rows of a selection.")
    rows = rows_table.select(ROWS_SCHEMA.names).cast(ROWS_SCHEMA).combine_chunks()
    return write_arrow(rows, path, {**metadata_of(rows_table), **metadata, "step": str(step)})


def count_start_groups(rows: pa.Table) -> int:
    return len(set(zip(rows["shard"].to_pylist(), rows["start_group"].to_pylist(), strict=True)))


def read_ledger(paths: RunPaths, step: int) -> pa.Table | None:
    """The rows of `step` in their order; None if the step is not recorded.

    Raises:
        DataError: the ledger is damaged.
    """
    path = ledger_path(paths, step)
    return read_ledger_file(path) if path.exists() else None


def read_ledger_file(path: Path) -> pa.Table:
    """The rows of a ledger.

    Raises:
        DataError: it is missing or damaged, or was written under another name, so its rows would count twice.
    """
    rows = map_arrow(path, ROWS_SCHEMA, _CURE).table
    step, match = metadata_of(rows).get("step"), STEP_NAME.fullmatch(path.name)
    if match is None or step != str(int(match[1])):
        raise DataError(
            f"{path} records step {step}, which its name does not say: it is a copy or was renamed; "
            "remove it, or give it its own name."
        )
    return rows


def recorded_steps(paths: RunPaths) -> list[int]:
    """Numbers of the recorded steps in ascending order."""
    return numbers_in(names_in(paths.ledger), STEP_NAME)


def ledgers_after(paths: RunPaths, step: int) -> Iterator[pa.Table]:
    """The rows of each step after this one that is recorded.

    Raises:
        DataError: a ledger is damaged.
    """
    return (read_ledger_file(ledger_path(paths, each)) for each in recorded_steps(paths) if each > step)


def last_step(paths: RunPaths) -> int:
    """The newest recorded step; 0 if there is none."""
    return max(recorded_steps(paths), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts over the rows of a run."""

    decisions: int
    orders_rejected: int
    max_policy_lag: int
    """Maximum over all rows that were trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eligible:
    """How much a step could train on."""

    start_groups: int
    """Start groups with an eligible advantage group."""
    advantage_groups: int
    expired: int
    """Advantage groups that had spread and became too old before they were used, since the index was opened."""


def count_run(paths: RunPaths) -> Totals:
    """Counts over the shards that are there and over all ledgers. A shard with damaged metadata counts nothing."""
    decisions = orders_rejected = lag = 0
    for _, shard in readable_shards(paths):
        decisions, orders_rejected = decisions + shard.decisions, orders_rejected + shard.orders_rejected
    for ledger in ledgers_after(paths, 0):
        lag = max(lag, int(ledger["policy_lag"].to_numpy().max(initial=0)))
    return Totals(decisions=decisions, orders_rejected=orders_rejected, max_policy_lag=lag)
