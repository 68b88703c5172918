"""Games of a teacher, played once and kept as `PlayedPhase` rows in Arrow shards.

`_teacher_games/<name>/000008.arrow` starts at game 8; the folder is named by everything that shapes the games, so models share
it, and a game's seed depends on its number alone: a kill loses one shard. A shard's order sets are checked before it is
published. Does not import torch, because worker processes that only play import this module.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from hashlib import sha256
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from entente.game.board import POWERS, Board
from entente.game.recorded import RefusedGameError, replay_recorded
from entente.game.scripted import SEARCHES, player
from entente.records.rows import PlayedPhase
from entente.telemetry.errors import DataError, EntenteError, InputError
from entente.telemetry.process_pool import ProcessPool
from entente.telemetry.progress import reporter
from entente.training.imitation.recorded_files import content_hash, read_values
from entente.training.imitation.settings import ImitationSettings
from storage.arrow_files import read_metadata, to_table, write_arrow
from storage.control import bot_sources, check_sources, code_of_play
from storage.files import file_lock, names_in, publish_directory

TEACHER_FOLDER = "_teacher_games"
RECORDED = "recorded-"
"""Prefix of a folder of recorded games, whose missing files are not made again."""
GAMES_A_SHARD = 8
"""A few seconds of work, which a kill loses. One game per shard if the teacher searches."""
MOST_REFUSED = 0.1
"""Largest share of rejected games. Archives hold a few odd games in a thousand; more means the wrong archive."""
_TWICE = "it occurs twice"
READ = "games read"
"""Metadata of a recorded shard: among others `seen`, the digest of each game -> where it was read."""
_RECIPE_VERSION, _IMPORT_VERSION = 3, 5

TeacherGame = Iterator[tuple[Board, Mapping[str, Sequence[str]]]]
"""The board before each phase, and the orders. The board advances between two items."""
OnProgress = Callable[[str, int, int], None]


class Search(Protocol):
    """Its `repr` names everything that shapes the orders; worker processes get a copy."""

    def __call__(self, name: str, board: Board, power: str, rng_name: str) -> Sequence[str]:
        """The seed of the search derives from `rng_name`."""
        ...


def scripted_game(number: int, settings: ImitationSettings, search: Search | None = None) -> TeacherGame:
    """Up to the last year; `search` gives the orders of those that search."""
    rng_name = f"teacher game {number} of seed {settings.seed}"
    rng = random.Random(rng_name)
    names = {power: rng.choice(settings.teachers) for power in POWERS}
    board = Board.start()
    while not board.is_over and board.year <= settings.last_year:
        orders: dict[str, Sequence[str]] = {}
        for power, legal in board.legal_orders().items():
            if search is not None and names[power].endswith(SEARCHES):
                orders[power] = search(names[power].removesuffix(SEARCHES), board, power, f"{rng_name}, {board.phase}")
            else:
                orders[power] = player(names[power])(legal, rng, board)
        yield board, orders
        board.step(orders)


def phases_of(number: int, game: TeacherGame, teacher: str) -> list[PlayedPhase]:
    """The rows of a game, without order results. Raises InputError if an order set is not legal."""
    rows = []
    for phase_index, (board, orders) in enumerate(game):
        legal = board.legal_orders()
        for power, own in orders.items():
            if power not in legal or not legal[power].admits(own):
                raise InputError(
                    f"{teacher} ordered {', '.join(own) or 'nothing'} for {power} in {board.phase} of game {number}, "
                    "which is not a legal order set: fix the teacher; nothing was trained"
                )
        frozen = board.snapshot(game_id="", seed=0, source="")
        rows.append(
            PlayedPhase(
                start_group=number,
                fork=0,
                phase_index=phase_index,
                phase=board.phase,
                snapshot_id=frozen.snapshot_id,
                position=frozen.position,
                orders=json.dumps({power: list(own) for power, own in orders.items()}),
                results="{}",
            )
        )
    return rows


def make_games(root: Path, settings: ImitationSettings, processes: int, report: OnProgress, search: Search | None = None) -> Path:
    """Play missing games, or import recorded ones. Raises InputError for an illegal order or unusable file."""
    if settings.recorded:
        return _import_games(root, settings, report)
    search = search if settings.searches else None
    folder, missing = _scripted_folder(root, settings, search), _missing_shards(root, settings, search)
    size = _shard_size(settings)
    total = len(range(0, settings.games, size))
    for done in _play_missing(folder, missing, settings, processes, search):
        report("teacher games", (total - len(missing) + done) * size, total * size)
    return folder


def _shard_size(settings: ImitationSettings) -> int:
    return 1 if settings.searches else GAMES_A_SHARD


def _scripted_folder(root: Path, settings: ImitationSettings, search: Search | None) -> Path:
    shaping = f"{_RECIPE_VERSION} {settings.teachers} {settings.last_year} {settings.seed}{f' {search!r}' if search else ''}"
    shaping += f" {sorted(code_of_play(settings.teachers).items())}"  # else games of two programs would lie in one folder
    return root / f"scripted-{sha256(shaping.encode()).hexdigest()[:12]}"


def _missing_shards(root: Path, settings: ImitationSettings, search: Search | None) -> list[int]:
    folder, size = _scripted_folder(root, settings, search), _shard_size(settings)
    return [first for first in range(0, settings.games, size) if not _shard_path(folder, first).exists()]


def _shard_path(folder: Path, first: int) -> Path:
    return folder / f"{first:06d}.arrow"


def _play_missing(
    folder: Path, firsts: Sequence[int], settings: ImitationSettings, processes: int, search: Search | None
) -> Iterator[int]:
    sources = bot_sources(settings.teachers)
    if len(firsts) <= 1 or processes == 1:
        for done, first in enumerate(firsts, start=1):
            _play_shard(folder, first, settings, search, sources)
            yield done
        return
    with ProcessPool(min(processes, len(firsts))) as pool:
        playing = [pool.submit(_play_shard, folder, first, settings, search, sources) for first in firsts]
        for done, each in enumerate(as_completed(playing), start=1):
            each.result()
            yield done


def _play_shard(folder: Path, first: int, settings: ImitationSettings, search: Search | None, sources: Mapping[str, str]) -> None:
    check_sources(sources)
    who = f"the teacher {' or '.join(dict.fromkeys(settings.teachers))}"
    numbers = range(first, first + _shard_size(settings))
    _publish(folder, first, (phases_of(number, scripted_game(number, settings, search), who) for number in numbers), who)


def _publish(
    folder: Path, first: int, games: Iterable[list[PlayedPhase]], teacher: str, about: Mapping[str, str] = MappingProxyType({})
) -> None:
    rows = [row for game in games for row in game]
    write_arrow(to_table(rows, PlayedPhase), _shard_path(folder, first), {"teacher": teacher, "first_game": str(first), **about})


def _import_games(root: Path, settings: ImitationSettings, report: OnProgress) -> Path:
    """The folder is named by the files' content. Unreadable games are skipped and reported. A killed import goes on."""
    digest, size = content_hash(settings.recorded)
    content = f"{_IMPORT_VERSION} {digest} {sorted(code_of_play().items())}"  # the code also reads games
    folder = root / f"{RECORDED}{sha256(content.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    lock = root / f".{folder.name}.lock"
    with file_lock(lock) as mine:
        if not mine:
            raise InputError("another process reads these recorded games: wait for it")
        try:
            if not folder.is_dir():
                values = read_values(settings.recorded, lambda done: report("recorded games, bytes", done, size))
                _read_on(_Reading(root / f".{folder.name}.reading"), values, folder)
        finally:
            lock.unlink()
    return folder


def _read_on(reading: "_Reading", values: Iterator[tuple[str, Any]], folder: Path) -> None:
    if reading.games:
        reporter().say(f"{reading.games:,} recorded games were read before; reading goes on after them")
    games = _recorded_games(islice(values, reading.values, None), reading)
    while some := list(islice(games, GAMES_A_SHARD)):
        reading.publish(some)
    try:
        _show_refused(reading.games, reading.refused)
    except EntenteError:
        shutil.rmtree(reading.folder, ignore_errors=True)
        raise
    publish_directory(reading.folder, folder)


class _Reading:
    """An import in progress. Each shard's metadata has what was read since the shard before: the number of values, the digest
    of each game, and the rejected games by reason."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.games, self.values = folder, 0, 0
        self.seen: dict[str, str] = {}
        self.refused: dict[str, list[str]] = {}
        self._written: dict[str, int] = {}
        for first in range(0, len(names_in(folder)) * GAMES_A_SHARD, GAMES_A_SHARD):
            try:
                stored = json.loads(read_metadata(_shard_path(folder, first))[READ])
            except DataError as error:
                reporter().say(f"{error} Reading the recorded games again from the first.")
                shutil.rmtree(folder)
                return self.__init__(folder)
            self.values, self.games = stored["values"], self.games + len(stored["seen"])
            self.seen |= stored["seen"]
            for reason, sentences in stored["refused"].items():
                self.refused.setdefault(reason, []).extend(sentences)
        self._mark()

    def publish(self, games: Sequence[list[PlayedPhase]]) -> None:
        new = {reason: each[self._written.get(reason, 0) :] for reason, each in self.refused.items()}
        seen = dict(islice(self.seen.items(), self.games, None))
        read = json.dumps({"values": self.values, "seen": seen, "refused": new})
        _publish(self.folder, self.games, games, "recorded games", {READ: read})
        self.games += len(games)
        self._mark()

    def _mark(self) -> None:
        self._written = {reason: len(sentences) for reason, sentences in self.refused.items()}


def _recorded_games(values: Iterable[tuple[str, Any]], reading: _Reading) -> Iterator[list[PlayedPhase]]:
    """The rows of each game; `reading` collects the rejected ones by reason.

    A duplicate is read once: otherwise it could be in both the training and the held-out part."""
    seen = reading.seen
    for where, saved in values:
        reading.values += 1
        try:
            if isinstance(saved, ValueError):
                raise RefusedGameError("it is not JSON", f"{where} is not JSON: {saved}")
            rows = phases_of(len(seen), replay_recorded(saved, where), where)
            if not rows:
                raise RefusedGameError("nothing was played in it", f"in {where} nothing was played: leave it out")
            digest = sha256("".join(f"{row.snapshot_id}{row.orders}" for row in rows).encode()).hexdigest()
            if digest in seen:
                raise RefusedGameError(_TWICE, f"{where} is {seen[digest]} again: pass each game once")
        except RefusedGameError as error:
            reading.refused.setdefault(error.reason, []).append(str(error))
        else:
            seen[digest] = where
            yield rows


def _show_refused(games: int, refused: Mapping[str, Sequence[str]]) -> None:
    """Raises an error if too many were rejected, or too few are left."""
    reasons = sorted(refused, key=lambda reason: (reason == _TWICE, -len(refused[reason])))
    count = sum(len(sentences) for reason, sentences in refused.items() if reason != _TWICE)
    if refused:
        reporter().say(f"read {games:,} recorded games and skipped {sum(map(len, refused.values())):,}:")
    for reason in reasons:
        reporter().say(f"{len(refused[reason]):>8,}  {reason}; the first: {refused[reason][0]}")
    if count > MOST_REFUSED * (games + count):
        raise EntenteError(
            f"{count:,} of {games + count:,} recorded games cannot be read, more than {MOST_REFUSED:.0%}, and nothing is kept; "
            f"most often {reasons[0]}: {refused[reasons[0]][0]}"
        )
    if games < 2:
        raise InputError(f"the recorded files hold {games} games: imitation needs one to train on and one to hold out")
