"""Reads everything a run's report needs: what `read_run` reads, scores, matches, curve, and figures from the rows.

`troubles` lists what cannot be read. Writes nothing."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from entente.evaluation.match_files import MatchRecord, read_matches
from entente.evaluation.score_files import ScoreRecord, TrackPoint, read_scores, read_track
from entente.reports.read_run import MetricsFile, RecordedRun, read_run
from entente.reports.return_curve import CurvePoint, return_curve
from entente.telemetry.errors import DataError, InputError
from storage.arrow_files import FINAL
from storage.control import edited_since, part_sources
from storage.files import file_marks
from storage.league_files import LeagueStep, newest_league
from storage.ledger import last_step, ledger_path, read_ledger
from storage.rewards import check_reward_weights, returns_of
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.shards import LOCAL_PRODUCER, describe_shard, open_phases, open_shard, shard_names

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    return_of_all: Mapping[int, float] = field(default_factory=dict)
    """Mean return of every complete decision that a policy version sampled, trained on or not, without probes."""
    failures: Sequence[tuple[str, int]] = ()
    """Reasons why forks ended early, with their number, most first."""
    refused: Sequence[tuple[str, str]] = ()
    decisions: int = 0
    """Stored rows, without those of refused shards and of probes."""
    left: int = 0
    """Shards that are still to be read."""


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
    return FactsReader(paths).whole(rows=rows)


def edited_rewards(weights: Mapping[str, float]) -> str:
    """A sentence if a package of the user's rewards was edited since the first call, which belongs where they are loaded."""
    try:
        edited = edited_since(part_sources(name.removeprefix(FINAL) for name in weights))
    except OSError:  # an editor replaces the file just now
        return ""
    return f"Returns are those of {', '.join(edited)} before an edit; start this program again for the others." if edited else ""


class FactsReader:
    """Reads a run's facts, again and again while it trains; what has not changed since is not read again."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths, self._metrics = paths, MetricsFile(paths.metrics)
        self._known: dict[str, tuple[object, Any]] = {}
        self._counter: RowCounter | None = None
        self._begun: object = None
        self._returns = lru_cache(maxsize=512)(lambda step: read_ledger(paths, step))

    def quick(self) -> RunFacts:
        """Without curve, rows and the search for files that were set aside."""
        run = read_run(self._paths, self._metrics)
        troubles = list(run.troubles)
        marks = [file_marks(folder) for folder in (self._paths.scores, self._paths.track, self._paths.matches)]

        def whole(what: str, read: Callable[[], _T], otherwise: _T) -> _T:
            if what not in self._known or self._known[what][0] != marks:
                try:
                    self._known[what] = marks, (read(), "")
                except (DataError, InputError) as error:
                    self._known[what] = marks, (otherwise, f"{what} left out: {error}")
            found, trouble = self._known[what][1]
            troubles.extend([trouble] if trouble else [])
            return found

        return RunFacts(
            **{each.name: getattr(run, each.name) for each in fields(run) if each.name != "troubles"},
            troubles=troubles,
            begun_step=last_step(self._paths),
            scores=whole("Scores are", lambda: read_scores(self._paths), {}),
            track=whole("The track of strength is", lambda: read_track(self._paths), []),
            matches=whole("Matches are", lambda: read_matches(self._paths.matches), []),
            league=self._league(troubles),
        )

    def _league(self, troubles: list[str]) -> LeagueStep | None:
        try:
            return newest_league(self._paths)
        except DataError as error:
            troubles.append(f"The league is left out: {error}")
            return None

    def whole(self, *, rows: bool = True, shards: int | None = None) -> RunFacts:
        """`shards`: the largest number of new ones to read; None: all."""
        facts, curve, counted = self.quick(), list[CurvePoint](), None
        self._forget_another_run()
        troubles = list(facts.troubles)
        if damaged := sorted(file.name for file in self._paths.root.rglob(".*.damaged-*")):
            troubles.append(f"The run set damaged files aside and repeated their work: {', '.join(damaged)}.")
        try:
            curve = return_curve(sorted(facts.steps), self._returns)
        except DataError as error:
            troubles.append(f"The curve is left out: {error}")
        try:
            if rows:
                self._counter = self._counter or RowCounter(self._paths, facts.settings.get("storage", {}))
                counted = self._counter.read(shards)
                troubles += filter(None, [edited_rewards(self._counter.reward_weights)])
        except InputError as error:  # a reward of a package that is not installed here
            troubles.append(f"Rows are left out: {error}")
        return replace(facts, troubles=troubles, curve=curve, rows=counted)

    def _forget_another_run(self) -> None:
        """Another run may have taken the name: its folder is another one, or its first ledger, which never changes."""
        if (begun := (self._paths.root.stat().st_ino, file_marks(ledger_path(self._paths, 1)))) != self._begun:
            self._begun, self._counter = begun, None
            self._returns.cache_clear()


class RowCounter:
    """Counts a run's rows shard by shard, so that a page which stays open reads each shard once."""

    def __init__(self, paths: RunPaths, storage: Mapping[str, Any]) -> None:
        """`storage`: those of the run's settings. Raises InputError for a reward of a package that is not installed here."""
        self._paths = paths
        self._how = StorageSettings(**{name: storage[name] for name in ("reward_weights", "discount") if name in storage})
        self.reward_weights = self._how.reward_weights
        check_reward_weights(self.reward_weights)
        edited_rewards(self.reward_weights)  # remembers what is loaded
        self._read: set[str] = set()
        self._groups: dict[tuple[str, int], str] = {}
        self._returns: dict[int, tuple[float, int]] = {}
        self._failures: Counter[str] = Counter()
        self._refused: dict[str, tuple[str, object]] = {}
        """Why, and the marks of the file from before it was read."""
        self._decisions = 0

    def read(self, most: int | None = None) -> RowFacts:
        """What all shards hold that were read so far, after reading at most `most` new ones. A refused shard is new once its file
        is another one, as after its start groups were played again."""
        new = [name for name in shard_names(self._paths) if name not in self._read or self._is_replaced(name)]
        for name in new[:most]:
            self._read.add(name)
            self._refused.pop(name, None)
            path = self._paths.shards / name
            marks = file_marks(path)
            try:
                decisions = open_shard(path)
                open_phases(path, decisions)
                self._add(name, path, decisions)
            except DataError as error:
                if path.exists():
                    self._refused[name] = str(error), marks
                else:  # it was removed meanwhile
                    self._read.discard(name)
        return RowFacts(
            return_of_all={version: total / rows for version, (total, rows) in sorted(self._returns.items())},
            failures=sorted(self._failures.items(), key=lambda each: (-each[1], each[0])),
            refused=[(name, sentence) for name, (sentence, _) in self._refused.items()],
            decisions=self._decisions,
            left=len(new[most:]) if most is not None else 0,
        )

    def _is_replaced(self, name: str) -> bool:
        return name in self._refused and self._refused[name][1] != file_marks(self._paths.shards / name)

    def _add(self, name: str, path: Path, decisions: pa.Table) -> None:
        producer = name.partition("/")[0]
        for group in decisions["start_group"].unique().to_pylist():
            if self._groups.setdefault((producer, group), name) != name:
                raise DataError(f"{path} repeats start group {group} of another shard; remove one of the two.")
        statuses, versions = decisions["status"].to_pylist(), decisions["policy_version"].to_pylist()
        if producer == LOCAL_PRODUCER:
            self._decisions += decisions.num_rows
            returns = returns_of(decisions, self._how.reward_weights, self._how.discount)
            for value, status, version in zip(returns.tolist(), statuses, versions, strict=True):
                if status == "complete":
                    total, rows = self._returns.get(version, (0.0, 0))
                    self._returns[version] = total + value, rows + 1
        forks = zip(*(decisions[column].to_pylist() for column in ("start_group", "fork", "reason")), statuses, strict=True)
        failed = {(group, fork, reason) for group, fork, reason, status in forks if status != "complete"}
        self._failures.update([*(reason for _, _, reason in failed), *describe_shard(path, decisions).failed_without_rows])
