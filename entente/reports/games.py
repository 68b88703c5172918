"""The games of a run and their names. Each fork of each start group is one game.

A name is START_GROUP/FORK, as 12/3, or PRODUCER/12/3 where several producers played that game. `latest`, `best`, `worst`
and a decision's id are names too. Reads neither tokens nor positions.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import duckdb

from entente.telemetry.errors import DataError, InputError
from storage.run_sql import connect, left_out
from storage.runs import RunPaths

LISTED = 12
_NAME = re.compile(r"(?:(?P<producer>[^/]+)/)?(?P<group>\d+)/(?P<fork>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GameName:
    producer: str
    start_group: int
    fork: int
    shard: str
    """Its file below the run's `shards/`."""
    phases: int
    first: str
    last: str
    powers: tuple[str, ...]
    version: int
    """Newest policy version that played."""
    status: str
    """complete | failed."""
    gain: float
    """Centres that the policy's powers gained in total."""
    ambiguous: bool = False
    """Another producer of the run played this fork of this start group too."""
    lacking: str = ""
    """Of `latest`, `best` or `worst`: the sentence on the shards whose games were no choice; empty if there are none."""

    @property
    def name(self) -> str:
        """The shortest name that `find_game` accepts, if `games_of` made the game."""
        return self.full_name if self.ambiguous else f"{self.start_group}/{self.fork}"

    @property
    def full_name(self) -> str:
        return f"{self.producer}/{self.start_group}/{self.fork}"


_ALL = """
WITH played AS (
    SELECT shard, producer, start_group, fork, list_sort(list(DISTINCT power)) AS powers, max(policy_version) AS version,
        min(status) AS status, sum(centres_gained) AS gain
    FROM decisions GROUP BY ALL
), boards AS (
    SELECT shard, producer, start_group, fork, count(*) AS phases,
        arg_min(phase, phase_index) AS first, arg_max(phase, phase_index) AS last
    FROM phases GROUP BY ALL
)
SELECT producer, start_group, fork, shard, coalesce(phases, 0), coalesce(first, ''), coalesce(last, ''), powers, version, status,
    gain
FROM played LEFT JOIN boards USING (shard, producer, start_group, fork)
ORDER BY version, start_group, producer, fork
"""


def games_of(connection: duckdb.DuckDBPyConnection) -> list[GameName]:
    """All games with a decision of the policy, oldest first."""
    names = [name for name in GameName.__annotations__ if name not in ("ambiguous", "lacking")]
    rows: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in connection.sql(_ALL).fetchall()]
    producers: dict[tuple[int, int], set[str]] = {}
    for row in rows:
        producers.setdefault((row["start_group"], row["fork"]), set()).add(row["producer"])
    for row in rows:
        row["powers"] = tuple(row["powers"])
        row["ambiguous"] = len(producers[row["start_group"], row["fork"]]) > 1
    return [GameName(**row) for row in rows]


def games_to_replay(connection: duckdb.DuckDBPyConnection, run: str) -> list[GameName]:
    """As `games_of`; raises InputError if there is none, DataError if none can be read."""
    if games := games_of(connection):
        return games
    if refused := connection.sql("SELECT reason FROM rejected_files ORDER BY shard").fetchall():
        raise DataError(f"run '{run}' has no game that can be read: {refused[0][0]}")
    raise InputError(f"run '{run}' has played no game yet: there is nothing to replay")


def find_game(paths: RunPaths, asked: str) -> GameName:
    with connect(paths.root) as connection:
        return _find(connection, paths.root.name, asked)


def _find(connection: duckdb.DuckDBPyConnection, run: str, asked: str) -> GameName:
    games = games_to_replay(connection, run)
    if asked in _CHOICES:
        return replace(_CHOICES[asked](games), lacking=left_out(connection))
    if asked.isdecimal():
        return _by_number(connection, games, run, int(asked))
    parts = _NAME.fullmatch(asked)
    if parts is None:
        raise InputError(f"'{asked}' names no game: use START_GROUP/FORK, latest, best or worst; {listing(games)}")
    group, fork = int(parts["group"]), int(parts["fork"])
    matching = [g for g in games if (g.start_group, g.fork) == (group, fork) and parts["producer"] in (None, g.producer)]
    if len(matching) > 1:
        raise InputError(f"several producers played {asked}: use {' or '.join(game.full_name for game in matching)}")
    if matching:
        return matching[0]
    _say_if_damaged(connection, asked, group, games)
    raise InputError(f"run '{run}' has no game {asked}; {listing([g for g in games if g.start_group == group] or games)}")


def is_name_of_run(asked: str) -> bool:
    """False for games of `entente play`, which have other names."""
    return asked in _CHOICES or asked.isdecimal() or "/" in asked


def listing(games: list[GameName]) -> str:
    names = ", ".join(game.name for game in games[-LISTED:])
    return f"there {'is' if len(games) == 1 else 'are'} {'the last of ' * (len(games) > LISTED)}{len(games)}: {names}"


_CHOICES: dict[str, Callable[[list[GameName]], GameName]] = {
    "latest": lambda games: max(games, key=lambda game: (game.version, game.start_group, -game.fork)),
    "best": lambda games: max(games, key=lambda game: (game.status == "complete", game.gain, game.version)),
    "worst": lambda games: min(games, key=lambda game: (game.status != "complete", game.gain, -game.version)),
}


def _by_number(connection: duckdb.DuckDBPyConnection, games: list[GameName], run: str, number: int) -> GameName:
    where = "SELECT shard, start_group, fork FROM decisions WHERE decision_id = ?"
    if number < 1 << 63 and (rows := connection.execute(where, [number]).fetchall()):
        return next(game for game in games if (game.shard, game.start_group, game.fork) == rows[0])
    forks = [game for game in games if game.start_group == number]
    if forks:
        raise InputError(f"start group {number} was played several times: name the fork; {listing(forks)}")
    raise InputError(f"run '{run}' has neither a start group nor a decision {number}; {listing(games)}")


def _say_if_damaged(connection: duckdb.DuckDBPyConnection, asked: str, group: int, games: list[GameName]) -> None:
    """Raise DataError if the start group is in a damaged shard: the last one that begins at or before it."""
    for shard, sentence in connection.sql("SELECT shard, reason FROM rejected_files ORDER BY shard DESC").fetchall():
        number = re.search(r"(\d+)\.arrow$", shard)
        between = [game for game in games if number and int(number[1]) < game.start_group < group]
        if number and int(number[1]) <= group and not between:
            raise DataError(f"game {asked} cannot be replayed: {sentence}")
