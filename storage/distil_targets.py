"""Distillation targets in files: published once, verified when opened, named by the ledgers of the steps that use them.

`distil_targets/<round>/000064.arrow` holds consecutive visited positions, named after the first one's number; its metadata has
the teacher's settings. `storage/distil_store.py` selects and gathers. This module calls no teacher.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from entente.records.distil_target import DistilTarget
from entente.telemetry.errors import DataError
from storage.arrow_files import DISTIL_TARGET_SCHEMA, MappedFile, map_arrow, metadata_of, to_table, write_arrow
from storage.runs import RunPaths, check_name

LEDGER_KEY = "distil_targets"
"""Entry of a ledger's metadata: a JSON list of [shard, row, distillation target id, checksum] for each target of the step."""
_SUM_ERROR = 1e-5
"""Largest difference from 1 of the sum of a target's float32 probabilities."""


@dataclass(frozen=True, slots=True)
class DistilTargetRef:
    shard: str
    """File below `distil_targets/`."""
    row: int
    distil_target_id: int
    checksum: int


def distil_target_path(paths: RunPaths, round_name: str, first: int) -> Path:
    return paths.distil_targets / check_name(round_name, "The round") / f"{first:06d}.arrow"


def publish_distil_targets(
    paths: RunPaths, round_name: str, first: int, distil_targets: Sequence[DistilTarget], provenance: Mapping[str, str]
) -> bool:
    """Publish targets under the number of their first position; False, without a change, if that file exists. Raises
    DataError, and writes nothing, if a target breaks a rule, such as an answer that its legal table lacks."""
    for distil_target in distil_targets:
        if fault := _fault(distil_target):
            raise DataError(
                f"The distillation target of {distil_target.power} at {distil_target.phase} "
                f"(position {distil_target.snapshot_id}) cannot be used: {fault}; "
                "nothing was written. Fix the teacher."
            )
    path = distil_target_path(paths, round_name, first)
    metadata = {**provenance, "shard": f"{round_name}/{path.name}"}
    return write_arrow(to_table(distil_targets, DistilTarget), path, metadata)


def open_distil_targets(path: Path) -> MappedFile:
    return map_arrow(path, DISTIL_TARGET_SCHEMA)


def ledger_entry(distil_targets: Sequence[DistilTargetRef]) -> dict[str, str]:
    return {LEDGER_KEY: json.dumps([astuple(distil_target) for distil_target in distil_targets])} if distil_targets else {}


def recorded_distil_targets(ledger: pa.Table) -> list[DistilTargetRef]:
    """The targets that a step's ledger names; none in ledgers of early releases."""
    return [DistilTargetRef(*named) for named in json.loads(metadata_of(ledger).get(LEDGER_KEY, "[]"))]


def _fault(distil_target: DistilTarget) -> str:
    """The first rule that a target breaks; empty if none."""
    completions, sets = np.asarray(distil_target.completion_offsets), np.asarray(distil_target.legal_offsets)
    probabilities = np.asarray(distil_target.probabilities, np.float64)
    tokens, n = np.asarray(distil_target.completion_ids), len(probabilities)
    if not n or not all(len(each) == n for each in (distil_target.orders, distil_target.values, distil_target.visits)):
        return "its numbers of proposals, orders, values and visits differ, or are 0"
    if not np.isfinite(probabilities).all() or (probabilities < 0).any() or abs(probabilities.sum() - 1) > _SUM_ERROR:
        return "the probabilities of its proposals do not add up to 1"
    for offsets, count, end in ((completions, n, len(tokens)), (sets, len(tokens), len(distil_target.legal_ids))):
        if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 1).any():
            return "its offsets do not fit its tokens"
    legal, owner = np.asarray(distil_target.legal_ids), np.repeat(np.arange(len(tokens)), np.diff(sets))
    held = np.zeros(len(tokens), bool)
    held[owner[legal == tokens[owner]]] = True
    return "" if held.all() else "the teacher answers with orders that are not legal there"
