"""Scores of a run as files, `scores/<label>.json`: what was measured, of whom, and under which settings.

Promise: a file is whole or absent, and says enough for a reader to know whether it answers a question that is asked again: a
resumed run reads the base's score instead of playing for it.
"""

from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from evaluation.settings import EvaluationSettings
from evaluation.strength import Score
from storage.files import make_directory
from storage.runs import RunPaths, durable_write
from telemetry.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRecord:
    """One player's score against one kind of opponents."""

    label: str
    """Its name in the run's summary, as "base" or "trained_vs_mover"; or "track/v000010", a point between."""
    player: str
    """"policy", or a scripted player."""
    opponents: str
    """Scripted players of the other powers."""
    policy_version: int
    """The version scored; 0 for the base, and for scripted players."""
    settings: EvaluationSettings
    """How it was measured."""
    score: Score
    """What came out."""


_RECORD = TypeAdapter(ScoreRecord)


def write_score(paths: RunPaths, record: ScoreRecord) -> None:
    """Keep `record` under its label; a former one is replaced."""
    file = paths.scores / f"{record.label}.json"
    make_directory(file.parent)
    durable_write(file, _RECORD.dump_json(record, indent=1))


def read_score(paths: RunPaths, label: str) -> ScoreRecord | None:
    """The record under `label`; None if there is none.

    Raises:
        DataError: it is damaged, or the score of another label.
    """
    file = paths.scores / f"{label}.json"
    try:
        record = _RECORD.validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise DataError(f"{file} is no score of this version: delete it, and it is measured again") from error
    if record.label != label:
        raise DataError(f"{file} is the score of '{record.label}', so it is a copy: delete it, and its own is measured again")
    return record


def read_scores(paths: RunPaths) -> dict[str, ScoreRecord]:
    """All records of a run by label, in the order in which they were measured.

    Raises:
        DataError: one is damaged.
    """
    files = sorted(paths.scores.glob("*.json"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    records = {file.stem: read_score(paths, file.stem) for file in files}
    return {label: record for label, record in records.items() if record is not None}
