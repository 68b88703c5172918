"""Matches between policy versions and scripted players; each player plays all seven powers in turn.

A round is one start played seven times, with the seats rotated by one power each time. There are two seatings:

    against six   one player in one seat and the same opponents in the other six; all players of the match play the same rounds
    one table     the players share the seven seats; the player with the extra seats changes from round to round

The plan depends on the settings alone, so an interrupted match continues with the missing games. Compared players get the same
starts, powers, seeds and opponents' random numbers. The seats of one game form one cluster, and so do all games from held-out
positions of one source game.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from entente.evaluation.settings import MatchSettings
from entente.game.board import POWERS, Board
from entente.game.snapshot import Snapshot
from entente.players.endpoint_players import OutsideDecider
from entente.players.policy import Decider
from entente.players.read_answer import AnswerCounts
from entente.rollouts.fork import ForkPlan, play_fork
from entente.telemetry.errors import EngineError, InputError
from entente.telemetry.progress import GameProgress

GAMES_PER_ROUND = len(POWERS)
DEFAULT_GAMES = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class GamePlan:
    key: str
    cluster: str
    """Games of one cluster are not independent."""
    pair: str
    """Games of one pair differ only in the measured player."""
    start: Snapshot | None
    """None: the standard start, spring 1901."""
    seats: dict[str, str]
    """Power -> player."""
    measured: tuple[str, ...]
    """Powers whose results count for the player in that seat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GameResult:
    key: str
    cluster: str
    pair: str
    seats: dict[str, str]
    measured: tuple[str, ...]
    start: tuple[int, ...]
    """Centres at the start, int per power of POWERS."""
    centres: tuple[int, ...]
    """Centres at the end, int per power of POWERS."""
    phase: str
    """The first unplayed phase; empty after a solo or a draw."""
    ended: str
    """horizon | won | drawn."""
    rejected: int
    """Orders that the board rejected; more than 0 is a bug."""
    by_year: tuple[tuple[int, ...], ...]
    """Centres at the end of each year played, int per power of POWERS."""
    answers: dict[str, AnswerCounts] = field(default_factory=dict)
    """Endpoint -> its answers in this game; empty if none played."""


OnGame = Callable[[GameResult], None]


def rounds_for(games: int) -> int:
    return max(1, -(-games // GAMES_PER_ROUND))


def plan_match(settings: MatchSettings, rounds: int, held_out: Sequence[Snapshot] = ()) -> list[GamePlan]:
    """The games of `rounds` rounds, in order. Raises InputError if no held-out position to start from is a movement phase, or if
    some player shares no round of one table with the first, which it is compared with."""
    if not settings.opponents:
        _check_all_meet(settings.players, rounds)
    starts = _starts(settings, held_out)
    return [plan for number in range(rounds) for plan in _round(settings, number, starts[number % len(starts)])]


def _check_all_meet(players: Sequence[str], rounds: int) -> None:
    unmet, needed = set(players), 0
    while unmet:
        assert needed <= len(players), "no further table would bring another player to the first"
        table = _dealt(players, needed)
        unmet -= set(table) if players[0] in table else set()
        needed += 1
    if rounds < needed:
        raise InputError(
            f"in {rounds * GAMES_PER_ROUND} games not every one of {len(players)} players meets {players[0]}, with which they "
            f"are compared: play at least --games {needed * GAMES_PER_ROUND}"
        )


def _starts(settings: MatchSettings, held_out: Sequence[Snapshot]) -> list[Snapshot | None]:
    if settings.start == "standard":
        return [None]
    movements = [snapshot for snapshot in held_out if snapshot.phase_type == "M"]
    if not movements:
        raise InputError(
            "the run's state cache has no held-out position of a movement phase: "
            "use the standard start, or build a cache with cache.held_out_snapshots"
        )
    return list(movements)


def _round(settings: MatchSettings, number: int, start: Snapshot | None) -> list[GamePlan]:
    tables = (
        [((name, *[settings.opponents] * 6), name) for name in settings.players]
        if settings.opponents
        else [(_dealt(settings.players, number), "")]
    )
    plans = []
    for turn in range(GAMES_PER_ROUND):
        for table, player in tables:  # `player` is empty at one table
            seats = {power: table[(seat + turn) % len(table)] for seat, power in enumerate(POWERS)}
            measured = POWERS[-turn % len(POWERS)]
            plans.append(
                GamePlan(
                    key=f"{number}/{turn}/{player}" if player else f"{number}/{turn}",
                    cluster=f"game {number}/{turn}" if start is None else start.game_id,
                    pair=f"{number}/{turn}",
                    start=start,
                    seats=seats,
                    measured=(measured,) if player else POWERS,
                )
            )
    return plans


def _dealt(players: Sequence[str], number: int) -> tuple[str, ...]:
    """The players by seat, in turn; each round starts with the next player. From 14 players on the first sits at each table,
    because not all would meet it otherwise."""
    if len(players) >= 2 * len(POWERS):
        others = range(number * 6, number * 6 + 6)
        return players[0], *(players[1 + other % (len(players) - 1)] for other in others)
    return tuple(players[(number + seat) % len(players)] for seat in range(len(POWERS)))


async def play_match(
    plans: Sequence[GamePlan],
    settings: MatchSettings,
    deciders: Mapping[str, Decider],
    on_game: OnGame = lambda result: None,
) -> list[GameResult]:
    """Play the games, `settings.concurrency` at a time; results in plan order. Raises EngineError if a game failed: there is no
    partial result, because part of a round would be biased."""
    slots = asyncio.Semaphore(settings.concurrency)
    progress = GameProgress(f"playing {len(plans)} games", len(plans), settings.years)

    async def play(plan: GamePlan) -> GameResult:
        async with slots:
            result = await play_game(plan, settings, deciders, progress)
        on_game(result)
        progress.ended(plan.key)
        return result

    return list(await asyncio.gather(*(play(plan) for plan in plans)))


async def play_game(
    plan: GamePlan, settings: MatchSettings, deciders: Mapping[str, Decider], progress: GameProgress
) -> GameResult:
    board = Board.start() if plan.start is None else Board.restore(plan.start)
    dice_name = f"match/{settings.seed}/{plan.pair}"
    by_year: dict[str, tuple[int, ...]] = {}

    def on_phase(phase: str) -> None:
        by_year[phase[1:-1]] = board.centre_counts()  # the last phase of a year counts
        progress.played(plan.key, phase)

    fork = await play_fork(
        ForkPlan(
            name=f"match/{settings.seed}/{plan.key}",
            shared_name=dice_name,
            rng_name=dice_name,
            seats=plan.seats,
            horizon_years=settings.years,
            temperature=settings.temperature,
            snapshot_id="" if plan.start is None else plan.start.snapshot_id,
        ),
        board,
        deciders,
        on_phase=on_phase,
    )
    answers = {
        name: decider.take(f"match/{settings.seed}/{plan.key}")
        for name, decider in deciders.items()
        if isinstance(decider, OutsideDecider) and name in plan.seats.values()
    }
    if fork.status != "complete" or fork.start is None or fork.end is None:
        raise EngineError(f"game {plan.key} of the match failed: {fork.reason}")
    return GameResult(
        key=plan.key,
        cluster=plan.cluster,
        pair=plan.pair,
        seats=plan.seats,
        measured=plan.measured,
        start=fork.start.centres,
        centres=fork.end.centres,
        phase="" if board.is_over else board.phase,
        ended=fork.ended,
        rejected=fork.rejected,
        by_year=tuple(by_year.values()),
        answers=answers,
    )
