"""Reads the files of a run once for its report.

The run may be in any state: running, cut in the middle of a step, damaged in part, not begun. What cannot be read is listed in
`troubles`. Of a step that was logged twice, the last record counts. Nothing is written into the run, and no figure is
computed that a file holds already. Only the intervals of the return per step are new: they resample whole start groups, as those
of the scores resample whole games.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import numpy as np

from evaluation.intervals import estimate
from evaluation.match_files import MatchRecord, PlayerRating, read_matches, read_ratings
from evaluation.score_files import ScoreRecord, read_scores
from evaluation.track import TrackPoint, read_track
from reports.read_figures import read_figures, read_metrics, read_settings
from storage.asking import connect
from storage.control import ProducerStatus, read_producers
from storage.files import FILES
from storage.league_files import LeagueStep, newest_league
from storage.lineages import last_step
from storage.runs import RunPaths, last_written, refresh_run
from telemetry.errors import DataError, InputError

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """Figures from the stored rows; empty if there are none."""

    return_intervals: dict[int, tuple[float, float]]
    """Per step, the 95 % interval of the mean return of the rows it trained on; absent if too few start groups have them."""
    return_of_all: dict[int, float]
    """Per policy version, the mean return of every complete decision it drew, trained on or not."""
    lags: dict[int, int]
    """Policy lag -> rows trained with it."""
    failures: list[tuple[str, int]]
    """Reasons why forks ended early, with their number of forks that have rows, most first."""
    refused: list[tuple[str, str]]
    """Refused shards, each with the reason as a sentence."""
    decisions: int
    """Stored rows, without those of refused shards."""
    played: list[tuple[str, str, int, int]]
    """Producer, inference worker, start groups and decisions of each pair of the two."""


NO_ROWS = RowFacts(return_intervals={}, return_of_all={}, lags={}, failures=[], refused=[], decisions=0, played=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All facts for the report of a run."""

    name: str
    """The run's name, its folder's."""
    settings: Mapping[str, Any]
    """The resolved tree, as stored."""
    steps: dict[int, dict[str, float]]
    """Per finished step, its registered figures."""
    mismatch: dict[str, float]
    """Figures of the probe before the first step; empty if there was none."""
    scores: dict[str, ScoreRecord]
    """By label."""
    summary: Mapping[str, Any] | None
    """The summary that the run wrote at its end; None until then."""
    begun_step: int
    """Newest step whose batch is in the ledger; 0 if none."""
    quiet_s: float
    """Seconds since the run last wrote a figure, a row or a score."""
    at_work: bool
    """Whether a process of this machine holds the run's lock."""
    environment: Mapping[str, str] | None
    """The run's record of its machine; None if there is none."""
    rows: RowFacts
    """Figures from the stored rows."""
    troubles: list[str]
    """Sentences about what could not be read."""
    track: list[TrackPoint] = field(default_factory=list)
    """Strength by policy version."""
    matches: list[MatchRecord] = field(default_factory=list)
    """Matches of versions and scripted players, in the order in which they ended."""
    ratings: list[PlayerRating] = field(default_factory=list)
    """Players of all matches, best first."""
    league: LeagueStep | None = None
    """The past versions that the newest step met; None without a league."""
    alerts: list[str] = field(default_factory=list)
    """Sentences of the alerts so far."""
    producers: list[ProducerStatus] = field(default_factory=list)
    """The last status of each rollout producer."""

    @property
    def planned(self) -> int:
        """Steps that the settings ask for."""
        return int(self.settings["steps"])

    @property
    def done(self) -> int:
        """Newest finished step; 0 if none."""
        return max(self.steps, default=0)

    def series(self, name: str) -> list[float]:
        """One metric for steps 1 to `done`; NaN if a step lacks it."""
        return [self.steps.get(step, {}).get(name, float("nan")) for step in range(1, self.done + 1)]

    def total(self, name: str) -> float:
        """Sum of one metric over the steps that have it."""
        return sum(figures.get(name, 0.0) for figures in self.steps.values())


def read_run(paths: RunPaths) -> RunFacts:
    """Read all facts that exist.

    Raises:
        InputError: there is no run in that folder.
    """
    refresh_run(paths)
    settings = read_settings(paths)
    troubles: list[str] = []
    if damaged := sorted(file.name for file in paths.root.rglob(".*.damaged-*")):
        troubles.append(f"The run itself set aside what it found damaged, and did it again: {', '.join(damaged)}.")
    records = read_metrics(paths.metrics, troubles)
    producers, unread = read_producers(paths)
    troubles += unread
    return RunFacts(
        name=paths.root.name,
        settings=settings,
        steps={step: figures for step, figures in records.items() if "time/step_s" in figures},
        mismatch={name: value for name, value in records.get(0, {}).items() if name.startswith("mismatch/")},
        scores=_scores(paths, troubles),
        summary=_json(paths.summary, troubles),
        begun_step=last_step(paths),
        quiet_s=time.time() - _last_written(paths),
        at_work=FILES.is_held(paths.lock),
        environment=_json(paths.environment, troubles),
        rows=_rows(paths, settings.get("storage", {}), troubles),
        troubles=troubles,
        track=_whole(lambda: read_track(paths), "The track of strength", troubles),
        matches=_whole(lambda: read_matches(paths.matches), "Matches", troubles),
        ratings=_whole(lambda: read_ratings(paths.matches), "Ratings", troubles),
        league=next(iter(_whole(lambda: [newest_league(paths)], "The league", troubles)), None),
        alerts=_alerts(paths.alerts),
        producers=producers,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The progress of a run, from a few small files."""

    name: str
    planned: int
    """Steps that the settings ask for."""
    steps: dict[int, dict[str, float]]
    """Per finished step, its registered figures."""
    alerts: list[str]
    """Sentences of the alerts so far."""
    at_work: bool
    """Whether a process of this machine holds the run's lock."""
    is_over: bool
    """Whether its summary exists and has all steps of the settings."""
    quiet_s: float
    """Seconds since the run last wrote a figure."""


def read_progress(paths: RunPaths) -> RunProgress:
    """Read the progress of a run without opening its rows, which is quick for long runs too.

    Raises:
        InputError: there is no run in that folder.
    """
    refresh_run(paths)
    settings, steps = read_figures(paths)
    planned = int(settings["steps"])
    return RunProgress(
        name=paths.root.name,
        planned=planned,
        steps=steps,
        alerts=_alerts(paths.alerts),
        at_work=FILES.is_held(paths.lock),
        is_over=paths.summary.is_file() and max(steps, default=0) >= planned,
        quiet_s=time.time() - last_written(paths),
    )


def _alerts(file: Path) -> list[str]:
    said = []
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            alert = json.loads(line)
            said.append(f"alert ({alert['name']}): {alert['sentence']}")
        except (ValueError, KeyError, TypeError):
            continue
    return said


_Found = TypeVar("_Found")


def _whole(read: Callable[[], list[_Found]], what: str, troubles: list[str]) -> list[_Found]:
    try:
        return read()
    except DataError as error:
        troubles.append(f"{what}: left out, for {error}.")
        return []


def _scores(paths: RunPaths, troubles: list[str]) -> dict[str, ScoreRecord]:
    try:
        return read_scores(paths)
    except DataError as error:
        troubles.append(f"Scores are left out: {error}.")
        return {}


def _json(file: Path, troubles: list[str]) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_bytes())
    except ValueError:
        troubles.append(f"{file.name} is no whole JSON document and was left out.")
        return None


def _last_written(paths: RunPaths) -> float:
    """Time of the run's last write, in seconds since 1970."""
    entries = [entry for folder in (paths.ledger, paths.shards, paths.scores) for entry in FILES.entries(folder)]
    return max([last_written(paths), *(entry.touched() for entry in entries)])


def _rows(paths: RunPaths, storage: Mapping[str, Any], troubles: list[str]) -> RowFacts:
    if not paths.shards.is_dir():
        return NO_ROWS
    try:
        with connect(paths.root, blend=storage.get("blend"), discount=storage.get("discount", 1.0)) as connection:
            return _ask(connection)
    except (DataError, InputError) as error:  # a reward of a package that is not installed here
        troubles.append(f"Rows are left out: {error}")
        return NO_ROWS


def _ask(connection: duckdb.DuckDBPyConnection) -> RowFacts:
    trained = connection.execute('SELECT step, shard, start_group, "return" FROM trained ORDER BY step, place').fetchnumpy()
    groups = np.array([f"{shard}:{group}" for shard, group in zip(trained["shard"], trained["start_group"], strict=True)])
    intervals = {}
    for step in np.unique(trained["step"]).tolist():
        rows = trained["step"] == step
        found = estimate(trained["return"][rows], groups[rows], _RESAMPLES, step).interval
        if found is not None:
            intervals[step] = found
    lags = "SELECT policy_lag, count(*) FROM trained GROUP BY ALL ORDER BY ALL"
    drawn = """SELECT policy_version, avg("return") FROM decisions WHERE status = 'complete' GROUP BY ALL ORDER BY ALL"""
    failed = """
        SELECT reason, count(DISTINCT (shard, start_group, fork)) AS forks FROM decisions WHERE status <> 'complete'
        GROUP BY reason ORDER BY forks DESC, reason
    """
    (decisions,) = connection.sql("SELECT count(*) FROM decisions").fetchall()[0]
    return RowFacts(
        return_intervals=intervals,
        return_of_all=dict(connection.sql(drawn).fetchall()),
        lags=dict(connection.execute(lags).fetchall()),
        failures=connection.sql(failed).fetchall(),
        refused=connection.sql("SELECT shard, sentence FROM refused ORDER BY shard").fetchall(),
        decisions=decisions,
        played=connection.sql(_PLAYED).fetchall(),
    )


_PLAYED = """
    SELECT producer, worker, count(DISTINCT start_group)::INTEGER, count(*)::INTEGER FROM decisions GROUP BY ALL ORDER BY ALL
"""
