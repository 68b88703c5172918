"""Updates whose loss or gradient was no number: the weights stay as they were, the rows are named in a file, and after three in a
row the run stops.

    <run>/not_finite/<lineage>-step-000123-update-0.json

Promise: the file names every row of the update as a ledger does, and which micro-batches' losses were no numbers. Its rows are in
the step's ledger as well, so they are never chosen again.
Never: decide what is finite.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from storage.ledger import ROWS_SCHEMA
from storage.outcome import UpdateOutcome
from storage.runs import RunPaths, durable_write

MAX_SKIPPED_UPDATES = 3
"""Updates in a row after which something is wrong with more than a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedUpdate:
    """An update that was skipped."""

    number: int
    """Its place among the updates of the step, from 0."""
    decision_ids: Sequence[int]
    """Its rows."""
    outcome: UpdateOutcome


def write_skipped_rows(paths: RunPaths, lineage: str, step: int, found: SkippedUpdate, rows: pa.Table) -> Path:
    """Write the file.

    Args:
        rows: those of the step's ledger.
    """
    named = rows.filter(pa.array(np.isin(rows["decision_id"].to_numpy(), found.decision_ids))).select(ROWS_SCHEMA.names)
    record = {
        "step": step,
        "lineage": lineage,
        "update": found.number,
        # JSON has no infinities and no NaN; as words they can be read everywhere.
        "loss": str(found.outcome.loss),
        "gradient_norm": str(found.outcome.gradient_norm),
        "micro_batches": [str(loss) for loss in found.outcome.micro_batches],
        "rows": named.to_pylist(),
    }
    file = paths.root / "not_finite" / f"{lineage}-step-{step:06d}-update-{found.number}.json"
    file.parent.mkdir(exist_ok=True)
    durable_write(file, json.dumps(record, indent=1).encode())
    return file
