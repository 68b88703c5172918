"""Reads everything a run's report needs: what `read_run` reads, scores, matches, curve, and figures from the rows.

`troubles` lists what cannot be read. Writes nothing."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import duckdb
import pyarrow as pa

from entente.evaluation.match_files import MatchRecord, read_matches
from entente.evaluation.score_files import ScoreRecord, TrackPoint, read_scores, read_track
from entente.reports.read_run import RecordedRun, read_run
from entente.reports.return_curve import CurvePoint, return_curve
from entente.telemetry.errors import DataError, InputError
from storage.files import entries_in
from storage.league_files import LeagueStep, newest_league
from storage.ledger import last_step, read_ledger
from storage.run_sql import connect
from storage.runs import RunPaths
from storage.settings import StorageSettings

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    return_of_all: Mapping[int, float] = field(default_factory=dict)
    """Mean return of every complete decision that a policy version sampled, trained on or not."""
    failures: Sequence[tuple[str, int]] = ()
    """Reasons why forks ended early, with their number, most first."""
    refused: Sequence[tuple[str, str]] = ()
    decisions: int = 0
    """Stored rows, without those of refused shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts(RecordedRun):
    begun_step: int = 0
    """Newest step with a ledger; 0 if none."""
    curve: Sequence[CurvePoint] = ()
    scores: Mapping[str, ScoreRecord] = field(default_factory=dict)
    track: Sequence[TrackPoint] = ()
    matches: Sequence[MatchRecord] = ()
    league: LeagueStep | None = None
    """Past versions that the newest step played against; None without a league."""
    rows: RowFacts | None = None
    """None if not requested or not readable."""


def read_facts(paths: RunPaths, *, rows: bool = True) -> RunFacts:
    """`rows`: read the stored rows too, which takes time in proportion to their number."""
    run = read_run(paths)
    troubles = list(run.troubles)
    if damaged := sorted(file.name for file in paths.root.rglob(".*.damaged-*")):
        troubles.append(f"The run set damaged files aside and repeated their work: {', '.join(damaged)}.")

    def rows_of(step: int) -> pa.Table | None:
        return read_ledger(paths, step)

    def whole(read: Callable[[], _T], what: str, otherwise: _T) -> _T:
        try:
            return read()
        except (DataError, InputError) as error:  # InputError: a reward of a package that is not installed here
            troubles.append(f"{what} left out: {error}")
            return otherwise

    facts = RunFacts(
        **{each.name: getattr(run, each.name) for each in fields(run)},
        begun_step=last_step(paths),
        curve=whole(lambda: return_curve(sorted(run.steps), rows_of), "The curve is", []),
        scores=whole(lambda: read_scores(paths), "Scores are", {}),
        track=whole(lambda: read_track(paths), "The track of strength is", []),
        matches=whole(lambda: read_matches(paths.matches), "Matches are", []),
        league=whole(lambda: newest_league(paths), "The league is", None),
        rows=whole(lambda: _rows(paths, run.settings.get("storage", {})), "Rows are", None) if rows else None,
    )
    entries = [entry.touched() for folder in (paths.ledger, paths.shards, paths.scores) for entry in entries_in(folder)]
    quiet_s = min([facts.quiet_s, *(time.time() - touched for touched in entries)])
    return replace(facts, troubles=troubles, quiet_s=quiet_s)


def _rows(paths: RunPaths, storage: Mapping[str, Any]) -> RowFacts | None:
    if not paths.shards.is_dir():
        return None
    returns = {name: storage[name] for name in ("reward_weights", "discount") if name in storage}
    with connect(paths.root, StorageSettings(**returns)) as connection:
        return _ask(connection)


def _ask(connection: duckdb.DuckDBPyConnection) -> RowFacts:
    sampled = """SELECT policy_version, avg("return") FROM decisions WHERE status = 'complete' GROUP BY ALL ORDER BY ALL"""
    failed = """
        SELECT reason, count(DISTINCT (shard, start_group, fork)) AS forks FROM decisions WHERE status <> 'complete'
        GROUP BY reason ORDER BY forks DESC, reason
    """
    (decisions,) = connection.sql("SELECT count(*) FROM decisions").fetchall()[0]
    return RowFacts(
        return_of_all=dict(connection.sql(sampled).fetchall()),
        failures=connection.sql(failed).fetchall(),
        refused=connection.sql("SELECT shard, reason FROM rejected_files ORDER BY shard").fetchall(),
        decisions=decisions,
    )
