"""Score files of a run, `scores/<label>.json`: the score, the player and the settings.

    scores/base.json, scores/trained.json       the first and the last version; every run has them
    scores/track/v000010.json                   versions between, `evaluation.every` apart

Files are written atomically. They contain the settings and the program's code of play, so a resumed run reuses a score where
both are equal.
"""

from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from entente.evaluation.intervals import Estimate
from entente.evaluation.settings import EvaluationSettings
from entente.evaluation.strength import POLICY, Score
from entente.telemetry.errors import DataError
from entente.telemetry.read_file import open_regular
from storage.files import durable_write, make_directory
from storage.runs import RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRecord:
    label: str
    """Name in the run's summary: "base" or "trained_vs_mover"; or "track/v000010" for a version measured during training."""
    player: str
    """"policy", or a scripted player."""
    opponents: str
    policy_version: int
    """0 for the base and for scripted players."""
    settings: EvaluationSettings
    score: Score
    code: dict[str, str] = field(default_factory=dict)
    """As `storage.control.code_of_play`; empty in files that were written without it."""


_RECORD = TypeAdapter(ScoreRecord)


def write_score(paths: RunPaths, record: ScoreRecord) -> None:
    file = paths.scores / f"{record.label}.json"
    make_directory(file.parent)
    durable_write(file, _RECORD.dump_json(record, indent=1))


def read_score(paths: RunPaths, label: str) -> ScoreRecord | None:
    """The record with this label; None if there is none. Raises DataError if it is damaged or has another label."""
    file = paths.scores / f"{label}.json"
    try:
        with open_regular(file) as stream:
            record = _RECORD.validate_json(stream.read())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise DataError(f"{file} is not a score of this version: delete it, and Entente measures it again") from error
    if record.label != label:
        raise DataError(f"{file} is a copy of the score '{record.label}': delete it, and Entente measures '{label}' again")
    return record


def read_scores(paths: RunPaths, *, track: bool = False) -> dict[str, ScoreRecord]:
    """The records of a run by label: versions in their order, then scripted players. `track`: also those of versions between."""
    found = [*paths.scores.glob("*.json"), *(paths.track.glob("*.json") if track else ())]
    labels = [file.relative_to(paths.scores).with_suffix("").as_posix() for file in found]
    records = [record for label in labels if (record := read_score(paths, label)) is not None]
    records.sort(key=lambda record: (record.player != POLICY, record.policy_version, record.label))
    return {record.label: record for record in records}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackPoint:
    version: int
    opponents: str
    score: Estimate
    """Mean centres gained on held-out positions."""
    comparable: bool = True
    """True if it was measured as the newest version was: by the same program, against the same opponents, with equal settings."""


def track_label(version: int) -> str:
    return f"track/v{version:06d}"


def read_track(paths: RunPaths) -> list[TrackPoint]:
    labels = ["base", "trained", *(f"track/{file.stem}" for file in sorted(paths.track.glob("*.json")))]
    records = {record.policy_version: record for label in labels if (record := read_score(paths, label)) is not None}
    if not records:
        return []
    newest = measured_by(records[max(records)])
    return [
        TrackPoint(
            version=version,
            opponents=record.opponents,
            score=record.score.estimate,
            comparable=measured_by(record) == newest,
        )
        for version, record in sorted(records.items())
    ]


def measured_by(record: ScoreRecord) -> tuple[str, EvaluationSettings, dict[str, str]]:
    """Opponents, settings and program: only scores that are equal in these can be compared."""
    return record.opponents, record.settings.question, record.code
