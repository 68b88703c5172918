"""League files: past versions that are possible opponents in one producer's start groups of a step.

`league/local/000012.json` is published once, before the first of these groups is played, and never changes. Rule:
`entente/rollouts/league.py`.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from entente.telemetry.errors import DataError
from entente.telemetry.read_file import LARGEST_RESULT, read_regular
from storage.files import names_in, publish_once
from storage.runs import RunPaths, check_name
from storage.shards import LOCAL_PRODUCER

LEAGUE_EVERY = 10
"""Steps between two member versions: closer ones play nearly alike."""
RECENT_STEPS = 20
"""Steps whose forks count for a league: older forks say little about today's policy."""


class LeagueMember(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    games: int
    """Counted forks against it."""
    wins: float
    """Those that the policy won; a tie is half a win."""
    win_share: float
    """(wins + 1) / (games + 2)."""
    weight: float
    """(1 - win_share)^2, divided by the sum over members."""


class LeagueStep(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    served: int
    """Newest version served at the time of writing."""
    members: tuple[LeagueMember, ...]


def publish_league(paths: RunPaths, producer: str, made: LeagueStep) -> LeagueStep:
    """Publish the league of a step; returns it, or the one that another process published first."""
    file = _file(paths, producer, made.step)
    publish_once(file, lambda path: path.write_text(made.model_dump_json(indent=1)))
    return _read(file)


def read_league(paths: RunPaths, producer: str, step: int) -> LeagueStep | None:
    """The league of a producer's step; None without a file."""
    file = _file(paths, producer, step)
    return _read(file) if file.exists() else None


def newest_league(paths: RunPaths) -> LeagueStep | None:
    steps = [int(Path(name).stem) for name in names_in(paths.league / LOCAL_PRODUCER) if Path(name).stem.isdecimal()]
    return read_league(paths, LOCAL_PRODUCER, max(steps)) if steps else None


def _file(paths: RunPaths, producer: str, step: int) -> Path:
    return paths.league / check_name(producer, "The producer") / f"{step:06d}.json"


def _read(file: Path) -> LeagueStep:
    try:
        return LeagueStep.model_validate_json(read_regular(file, at_most=LARGEST_RESULT, what="league file", error=DataError))
    except ValidationError as error:
        raise DataError(f"{file} is damaged: restore it, or remove it to sample other opponents for the step") from error
