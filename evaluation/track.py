"""Strength over versions: the scores measured during training, read from the run's score files.

    scores/base.json, scores/trained.json       the first and the last version; every run has them
    scores/track/v000010.json                   versions between, `evaluation.every` apart

Versions that were not measured are missing.
"""

from dataclasses import dataclass

from evaluation.intervals import Estimate
from evaluation.score_files import read_score
from storage.runs import RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackPoint:
    """One version's strength."""

    version: int
    opponents: str
    """Scripted player that it was measured against."""
    score: Estimate
    """Mean centres gained on held-out positions."""


def track_label(version: int) -> str:
    """Label of the score file of a version between."""
    return f"track/v{version:06d}"


def read_track(paths: RunPaths) -> list[TrackPoint]:
    """All measured versions of a run, in order.

    Raises:
        DataError: a score file is damaged.
    """
    labels = ["base", "trained", *(f"track/{file.stem}" for file in sorted((paths.scores / "track").glob("*.json")))]
    records = {record.policy_version: record for label in labels if (record := read_score(paths, label)) is not None}
    return [
        TrackPoint(version=version, opponents=record.opponents, score=record.score.estimate)
        for version, record in sorted(records.items())
    ]
