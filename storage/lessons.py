"""Distillation targets ("lessons") in files: published once, verified when opened, and named by the ledgers of the steps that use
them.

`lessons/<round>/000064.arrow` holds the targets of consecutive visited positions of a round, named after the first one's
number. The metadata hold the teacher's settings. A step's ledger names its targets in its metadata. `storage/lesson_shelf.py`
selects and gathers them. This module calls no teacher.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from entente.records.lesson import Lesson
from entente.telemetry.errors import DataError
from storage.arrow_files import LESSON_SCHEMA, MappedFile, map_arrow, metadata_of, to_table, write_arrow
from storage.runs import RunPaths, check_name

LEDGER_KEY = "lessons"
"""Entry of a ledger's metadata: a JSON list of [shard, row, lesson id, checksum] for each target of the step."""
_SUM_ERROR = 1e-5
"""Largest difference from 1 of the sum of a target's float32 probabilities."""


@dataclass(frozen=True, slots=True)
class LessonRef:
    shard: str
    """File below `lessons/`."""
    row: int
    lesson_id: int
    checksum: int


def lesson_path(paths: RunPaths, round_name: str, first: int) -> Path:
    return paths.lessons / check_name(round_name, "The round") / f"{first:06d}.arrow"


def publish_lessons(
    paths: RunPaths, round_name: str, first: int, lessons: Sequence[Lesson], provenance: Mapping[str, str]
) -> bool:
    """Publish targets under the number of their first position; False, without a change, if that file exists. Raises DataError
    if a target breaks a rule, such as an answer that its legal table lacks. Nothing is written."""
    for lesson in lessons:
        if fault := _fault(lesson):
            raise DataError(
                f"The lesson of {lesson.power} at {lesson.phase} (position {lesson.snapshot_id}) cannot be used: {fault}; "
                "nothing was written. Fix the teacher."
            )
    path = lesson_path(paths, round_name, first)
    metadata = {**provenance, "shard": f"{round_name}/{path.name}"}
    return write_arrow(to_table(lessons, Lesson), path, metadata)


def open_lessons(path: Path) -> MappedFile:
    return map_arrow(path, LESSON_SCHEMA)


def ledger_entry(lessons: Sequence[LessonRef]) -> dict[str, str]:
    """Metadata of a ledger that names these targets; empty without targets."""
    return {LEDGER_KEY: json.dumps([astuple(lesson) for lesson in lessons])} if lessons else {}


def recorded_lessons(ledger: pa.Table) -> list[LessonRef]:
    """The targets that a step's ledger names; none in ledgers of early releases."""
    return [LessonRef(*named) for named in json.loads(metadata_of(ledger).get(LEDGER_KEY, "[]"))]


def _fault(lesson: Lesson) -> str:
    """The first rule that a target breaks; empty if none."""
    completions, sets = np.asarray(lesson.completion_offsets), np.asarray(lesson.legal_offsets)
    probabilities = np.asarray(lesson.probabilities, np.float64)
    tokens, n = np.asarray(lesson.completion_ids), len(probabilities)
    if not n or not all(len(each) == n for each in (lesson.orders, lesson.values, lesson.visits)):
        return "its numbers of proposals, orders, values and visits differ, or are 0"
    if not np.isfinite(probabilities).all() or (probabilities < 0).any() or abs(probabilities.sum() - 1) > _SUM_ERROR:
        return "the probabilities of its proposals do not add up to 1"
    for offsets, count, end in ((completions, n, len(tokens)), (sets, len(tokens), len(lesson.legal_ids))):
        if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 1).any():
            return "its offsets do not fit its tokens"
    legal, owner = np.asarray(lesson.legal_ids), np.repeat(np.arange(len(tokens)), np.diff(sets))
    held = np.zeros(len(tokens), bool)
    held[owner[legal == tokens[owner]]] = True
    return "" if held.all() else "the teacher answers with orders that are not legal there"
