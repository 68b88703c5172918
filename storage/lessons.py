"""Lessons in files: published once, verified when opened, and named by the ledgers of the steps that use them.

`lessons/<round>/000064.arrow` holds the lessons of consecutive visited positions of a round; its name has the first one's number.
The metadata hold the teacher's settings. A file is published once and never changes. A step's ledger names its lessons in its
metadata. `storage/lesson_shelf.py` chooses and gathers lessons. This module asks no teacher.
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
"""Entry of a ledger's metadata: a JSON list of [shard, row, lesson id, checksum] of each lesson of the step."""
_SUM_ERROR = 1e-5
"""Largest difference from 1 of the sum of a lesson's probabilities, which are float32."""


@dataclass(frozen=True, slots=True)
class LessonRef:
    """One lesson of a step, as its ledger names it."""

    shard: str
    """File below `lessons/`."""
    row: int
    lesson_id: int
    checksum: int


def lesson_path(paths: RunPaths, round_name: str, first: int) -> Path:
    """Path of the round's lessons from position `first` on."""
    return paths.lessons / check_name(round_name, "The round") / f"{first:06d}.arrow"


def publish_lessons(
    paths: RunPaths, round_name: str, first: int, lessons: Sequence[Lesson], provenance: Mapping[str, str]
) -> bool:
    """Publish lessons under the number of their first position; False if that file exists, which is kept.

    Raises:
        DataError: a lesson breaks a rule, such as an answer that its legal table does not have. Nothing is written.
    """
    for lesson in lessons:
        if fault := _fault(lesson):
            raise DataError(
                f"The lesson of {lesson.power} at {lesson.phase} (position {lesson.snapshot_id}) cannot be used: {fault}; "
                "nothing was written. Mend the teacher."
            )
    path = lesson_path(paths, round_name, first)
    metadata = {**provenance, "shard": f"{round_name}/{path.name}"}
    return write_arrow(to_table(lessons, Lesson), path, metadata)


def open_lessons(path: Path) -> MappedFile:
    """The verified lessons in a file, mapped."""
    return map_arrow(path, LESSON_SCHEMA)


def ledger_entry(lessons: Sequence[LessonRef]) -> dict[str, str]:
    """The entry of a ledger's metadata that names these lessons; empty without lessons."""
    return {LEDGER_KEY: json.dumps([astuple(lesson) for lesson in lessons])} if lessons else {}


def recorded_lessons(ledger: pa.Table) -> list[LessonRef]:
    """The lessons that a step's ledger names; none in ledgers of before."""
    return [LessonRef(*named) for named in json.loads(metadata_of(ledger).get(LEDGER_KEY, "[]"))]


def _fault(lesson: Lesson) -> str:
    """The first rule that a lesson breaks; empty if none."""
    completions, sets = np.asarray(lesson.completion_offsets), np.asarray(lesson.legal_offsets)
    probabilities = np.asarray(lesson.probabilities, np.float64)
    tokens, n = np.asarray(lesson.completion_ids), len(probabilities)
    if not n or not all(len(each) == n for each in (lesson.orders, lesson.values, lesson.visits)):
        return "its proposals, orders, values and visits are not equally many, or none"
    if not np.isfinite(probabilities).all() or (probabilities < 0).any() or abs(probabilities.sum() - 1) > _SUM_ERROR:
        return "the probabilities of its proposals do not add up to 1"
    for offsets, count, end in ((completions, n, len(tokens)), (sets, len(tokens), len(lesson.legal_ids))):
        if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 1).any():
            return "its offsets do not fit its tokens"
    legal, owner = np.asarray(lesson.legal_ids), np.repeat(np.arange(len(tokens)), np.diff(sets))
    held = np.zeros(len(tokens), bool)
    held[owner[legal == tokens[owner]]] = True
    return "" if held.all() else "the teacher answers with orders that are not legal there"
