"""Strength over versions: what a run measured while it trained, read from its score files.

    scores/base.json, scores/trained.json       the first and the last point, which every run has
    scores/track/v000010.json                   points between, `evaluation.every` versions apart
    scores/tactical/v000010.json                share of the tactical positions that the version solves

Never: a figure that no file holds; versions that nobody measured are not there.
"""

from dataclasses import dataclass

from evaluation.intervals import Estimate
from evaluation.score_files import ScoreRecord, read_score
from evaluation.tactics import read_tactics
from storage.runs import RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackPoint:
    """One version's strength."""

    version: int
    opponents: str
    """Scripted players that it was measured against."""
    score: Estimate
    """Mean centres gained on held-out positions."""
    tactical: Estimate | None
    """Share of the tactical positions that it solves; None where that was not measured."""


def track_label(version: int) -> str:
    """Name of a point's score file."""
    return f"track/v{version:06d}"


def read_track(paths: RunPaths) -> list[TrackPoint]:
    """All points of a run, by version.

    Raises:
        DataError: a score is damaged.
    """
    labels = ["base", "trained", *(f"track/{file.stem}" for file in sorted((paths.scores / "track").glob("*.json")))]
    records = {record.policy_version: record for label in labels if (record := read_score(paths, label)) is not None}
    return [_point(paths, records[version]) for version in sorted(records)]


def _point(paths: RunPaths, record: ScoreRecord) -> TrackPoint:
    solved = read_tactics(paths, record.policy_version)
    return TrackPoint(
        version=record.policy_version,
        opponents=record.opponents,
        score=record.score.estimate,
        tactical=None if solved is None else solved.share,
    )
