"""The ledger: which rows a trainer step used, written before the forward pass of that step.

`ledger/<lineage>/step-000137.arrow` is written once, by one trainer. A trainer that finds the name taken is not alone on the
run and must stop. A step is repeated by reading its ledger, never by selecting again. A file counts only under the name that it
was written for.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from storage.arrow_files import metadata_of, read_arrow, write_arrow
from storage.files import FILES
from storage.runs import RunPaths, check_name
from telemetry.errors import DataError

MAIN = "main"  # the lineage of a run that was never forked
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


def ledger_path(paths: RunPaths, lineage: str, step: int) -> Path:
    """Path of the ledger of this step."""
    return paths.ledger / check_name(lineage, "The lineage") / f"step-{step:06d}.arrow"


def write_ledger(paths: RunPaths, lineage: str, step: int, rows_table: pa.Table, metadata: Mapping[str, str]) -> bool:
    """Record the rows of `step` in their order; False if another trainer has recorded it, whose ledger is kept.

    Raises:
        DataError: `rows_table` lacks a column of `ROWS_SCHEMA`, so the step could not be repeated.
    """
    path = ledger_path(paths, lineage, step)
    if missing := [name for name in ROWS_SCHEMA.names if name not in rows_table.column_names]:
        raise DataError(f"{path} cannot be written without {', '.join(missing)}; give the rows of a selection.")
    rows = rows_table.select(ROWS_SCHEMA.names).cast(ROWS_SCHEMA).combine_chunks()
    return write_arrow(rows, path, {**metadata, "lineage": lineage, "step": str(step)})


def read_ledger(paths: RunPaths, lineage: str, step: int) -> pa.Table | None:
    """The rows of `step` in their order; None if the step is not recorded.

    Raises:
        DataError: the ledger is damaged.
    """
    path = ledger_path(paths, lineage, step)
    return read_ledger_file(path) if FILES.exists(path) else None


def read_ledger_file(path: Path, lineage: str = "") -> pa.Table:
    """The rows of a ledger.

    Args:
        lineage: the lineage that it must be of; empty: the one that its folder names.

    Raises:
        DataError: it is missing or damaged, or was written under another name, so its rows would count twice.
    """
    rows = read_arrow(path, ROWS_SCHEMA, _CURE)
    metadata, match = metadata_of(rows), STEP_NAME.fullmatch(path.name)
    recorded, step = metadata.get("lineage"), metadata.get("step")
    if match is None or (recorded, step) != (lineage or path.parent.name, str(int(match[1]))):
        raise DataError(
            f"{path} records step {step} of lineage '{recorded}', which its name does not say: it is a copy or was renamed; "
            "remove it, or give it its own name."
        )
    return rows


def recorded_steps(paths: RunPaths, lineage: str) -> list[int]:
    """Numbers of the recorded steps in ascending order."""
    folder = paths.ledger / check_name(lineage, "The lineage")
    return sorted(int(match[1]) for name in FILES.names(folder) if (match := STEP_NAME.fullmatch(name)))
