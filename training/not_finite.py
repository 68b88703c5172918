"""Records updates that were skipped because their loss or gradient was not finite. After three in a row the run stops.

    <run>/not_finite/step-000123-update-0.json

The file names every row of the update, with the columns of a ledger, its lessons, and the loss of each micro-batch. The rows are
also in the step's ledger, so they are not chosen again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from storage.json_files import write_json
from storage.ledger import ROWS_SCHEMA
from storage.outcome import UpdateOutcome
from storage.runs import RunPaths

MAX_SKIPPED_UPDATES = 3
"""After so many skipped updates in a row the run stops: the fault is then not in one batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedUpdate:
    """An update that was skipped."""

    number: int
    """Number of the update in its step, from 0."""
    decision_ids: Sequence[int]
    """Decisions of the update."""
    outcome: UpdateOutcome
    lesson_ids: Sequence[int] = ()
    """Lessons of the update."""


def write_skipped_rows(paths: RunPaths, step: int, found: SkippedUpdate, rows: pa.Table) -> Path:
    """Write the file of a skipped update.

    Args:
        rows: all rows of the step's ledger.

    Returns:
        The file.
    """
    named = rows.filter(pa.array(np.isin(rows["decision_id"].to_numpy(), found.decision_ids))).select(ROWS_SCHEMA.names)
    record = {
        "step": step,
        "update": found.number,
        # Written as text, because JSON has no infinity and no NaN.
        "loss": str(found.outcome.loss),
        "gradient_norm": str(found.outcome.gradient_norm),
        "micro_batches": [str(loss) for loss in found.outcome.micro_batches],
        "rows": named.to_pylist(),
        "lessons": list(found.lesson_ids),
    }
    file = paths.root / "not_finite" / f"step-{step:06d}-update-{found.number}.json"
    write_json(file, record)
    return file
