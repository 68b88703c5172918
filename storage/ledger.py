"""The ledger: which rows a trainer step used, written before the forward pass of that step. Does not load DuckDB.

`ledger/step-000137.arrow` is written once, by one trainer; a trainer that finds it already there shares the run with another
and must stop. A step is repeated by reading its ledger, never by selecting again. A file is valid only under its original
name. Counts over a run come from its ledgers and its shards' metadata.

A ledger prevents training twice on its rows. So each checkpoint copies the ledgers whose rows a later step could still select,
and resuming restores lost or damaged ones. Without a copy, the run resumes only if the rows are too old to be selected.
Damaged ledgers are renamed, never removed.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from entente.telemetry.errors import DataError
from storage.adapters import published_versions
from storage.arrow_files import map_arrow, metadata_of, write_arrow
from storage.files import names_in, publish_once, set_aside
from storage.runs import RunPaths, checkpoint_steps, numbers_in
from storage.settings import StorageSettings
from storage.shards import LOCAL_PRODUCER, readable_shards

STEP_NAME = re.compile(r"step-(\d{6,})\.arrow")
ROWS_SCHEMA = pa.schema(  # a chosen row: its place, its identity, and its lag, return and advantage group
    {
        "shard": pa.string(),
        "row": pa.int32(),
        "decision_id": pa.int64(),
        "start_group": pa.int64(),
        "fork": pa.int16(),
        "phase_index": pa.int16(),
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
    """Record the rows of `step` in order; False if another trainer already did. Raises DataError if `rows_table` lacks a
    column of `ROWS_SCHEMA`, because the step could not be repeated."""
    path = ledger_path(paths, step)
    if missing := [name for name in ROWS_SCHEMA.names if name not in rows_table.column_names]:
        raise DataError(f"{path} cannot be written without {', '.join(missing)}; pass the rows of a selection.")
    rows = rows_table.select(ROWS_SCHEMA.names).cast(ROWS_SCHEMA).combine_chunks()
    return write_arrow(rows, path, {**metadata_of(rows_table), **metadata, "step": str(step)})


def count_start_groups(rows: pa.Table) -> int:
    return len(set(zip(rows["shard"].to_pylist(), rows["start_group"].to_pylist(), strict=True)))


def read_ledger(paths: RunPaths, step: int) -> pa.Table | None:
    """The rows of `step` in order; None if it is not recorded. Raises DataError if the ledger is damaged."""
    path = ledger_path(paths, step)
    return read_ledger_file(path) if path.exists() else None


def read_ledger_file(path: Path) -> pa.Table:
    """Raises DataError if the ledger is missing, damaged or renamed, because its rows would count twice."""
    rows = map_arrow(path, ROWS_SCHEMA, _CURE).table
    step, match = metadata_of(rows).get("step"), STEP_NAME.fullmatch(path.name)
    if match is None or step != str(int(match[1])):
        raise DataError(
            f"{path} records step {step}, which does not match its name: it is a copy or was renamed; "
            "remove it, or restore its name."
        )
    return rows


def recorded_steps(paths: RunPaths) -> list[int]:
    return numbers_in(names_in(paths.ledger), STEP_NAME)


def ledgers_after(paths: RunPaths, step: int) -> Iterator[pa.Table]:
    """The rows of each recorded step after this one; raises DataError if a ledger is damaged."""
    return (read_ledger_file(ledger_path(paths, each)) for each in recorded_steps(paths) if each > step)


def last_step(paths: RunPaths) -> int:
    return max(recorded_steps(paths), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    decisions: int
    orders_rejected: int
    max_policy_lag: int
    """Maximum over all trained rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eligible:
    start_groups: int
    """Start groups with an eligible advantage group."""
    advantage_groups: int
    expired: int
    """Advantage groups with return_range that became too old before use, since the index was opened."""


def count_run(paths: RunPaths) -> Totals:
    """Counts over all present shards and all ledgers, without shards that have damaged metadata. Decisions of probes, of which a
    resumed run plays more, are not counted."""
    decisions = orders_rejected = lag = 0
    for _, shard in readable_shards(paths):
        decisions += shard.decisions if shard.producer == LOCAL_PRODUCER else 0
        orders_rejected += shard.orders_rejected
    for ledger in ledgers_after(paths, 0):
        lag = max(lag, int(ledger["policy_lag"].to_numpy().max(initial=0)))
    return Totals(decisions=decisions, orders_rejected=orders_rejected, max_policy_lag=lag)


# -- copies in checkpoints, and repair before a resume -------------------------------------------------------------------------


def ledgers_to_copy(paths: RunPaths, step: int, storage: StorageSettings) -> list[Path]:
    """The ledgers whose rows a step after `step` may select, and that of `step` itself."""
    first = min(step, _first_in_reach(step, storage))
    ledgers = (ledger_path(paths, each) for each in range(max(1, first), step + 1))
    return [path for path in ledgers if path.exists()]


def check_ledgers(paths: RunPaths, storage: StorageSettings) -> None:
    """Raise DataError if a resumed run could train again on rows of a lost or damaged ledger of which no checkpoint has a
    copy."""
    done, faults = _faults(paths)
    for step, (path, why) in faults.items():
        if _first_in_reach(done, storage) <= step <= done and _copy_of(paths, path) is None:
            newest = max(published_versions(paths), default=0)
            raise DataError(
                f"the ledger of step {step} is needed, so that its rows are not trained on again, and no checkpoint has a copy: "
                f"{path} is {why}. Restore it from a copy of the run, or start a new run with these weights, "
                f"which trains on rows of its own: entente train --run NAME --init-from {paths.root.name}:{newest}"
            )


def restore_ledgers(paths: RunPaths, storage: StorageSettings) -> list[str]:
    """Restore lost and damaged ledgers from checkpoints; returns a message for each."""
    check_ledgers(paths, storage)
    done, faults = _faults(paths)
    return [_repair(paths, step, path, why, trained=step <= done) for step, (path, why) in faults.items()]


def _repair(paths: RunPaths, step: int, path: Path, why: str, *, trained: bool) -> str:
    copy = _copy_of(paths, path)
    if path.exists():
        set_aside(path)
    if copy is not None:
        content = copy.read_bytes()
        publish_once(path, lambda aside: aside.write_bytes(content))
        return f"restored the ledger of step {step} from checkpoint {copy.parent.name}: {path} was {why}"
    if trained:
        return f"step {step} cannot be replayed, and its rows are too old for another step: {path} was {why}"
    return f"step {step} selects its rows again, because it was not trained: {path} was {why}"


def _first_in_reach(step_done: int, storage: StorageSettings) -> int:
    """The first step whose rows the step after `step_done` could use. The rows of step s have versions before s."""
    return step_done - storage.max_policy_lag + 1


def _faults(paths: RunPaths) -> tuple[int, Mapping[int, tuple[Path, str]]]:
    """The last trained step, and the lost or damaged ledgers: step -> path, and "missing" or "damaged"."""
    done = max([0, *checkpoint_steps(paths), *published_versions(paths)])
    faults = {}
    for step in sorted({*range(1, done + 1), *recorded_steps(paths)}):
        path = ledger_path(paths, step)
        try:
            read_ledger_file(path)
        except DataError:
            faults[step] = (path, "damaged" if path.exists() else "missing")
    return done, faults


def _copy_of(paths: RunPaths, ledger: Path) -> Path | None:
    for step in reversed(checkpoint_steps(paths)):
        copy = paths.checkpoint(step) / ledger.name
        if copy.exists():
            try:
                read_ledger_file(copy)
            except DataError:
                continue
            return copy
    return None
