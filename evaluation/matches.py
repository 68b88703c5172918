"""Matches: games in full seats between policy versions and scripted players, each on all seven powers in turn.

A round is one start, played seven times with the seating turned by one power each time, so every player
meets every power equally often. Two ways to sit:

    against six   a player in one seat, the same opponents in the six others; every player of the match plays the same rounds
    one table     the players dealt round the seven seats in turn, whoever has the extra seats changing from round to round

Promise: the plan depends on the settings alone, so a match that was broken off goes on with the games it lacks; players that
are compared meet the same starts, powers, opponents' dice and draws. Each game has dice of its own; all seats of one game are one
cluster, and so are all games from the held-out positions of one source game.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from evaluation.settings import MatchSettings
from game.board import POWERS, Board
from game.snapshot import Snapshot
from rollouts.deciders import Decider
from rollouts.fork import ForkPlan, play_fork
from telemetry.errors import EngineError, InputError

GAMES_OF_A_ROUND = len(POWERS)
GAMES_WITHOUT_A_WISH = 70
"""Games where neither a number nor a width is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GamePlan:
    """One game to be played."""

    key: str
    """Unique within the match."""
    cluster: str
    """Games of one cluster are not independent."""
    pair: str
    """Games of one pair differ in who is measured, and in nothing else."""
    start: Snapshot | None
    """None: spring 1901."""
    seats: dict[str, str]
    """Power -> player."""
    measured: tuple[str, ...]
    """Powers whose outcome counts for the player in that seat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GameResult:
    """How one game came out."""

    key: str
    cluster: str
    pair: str
    seats: dict[str, str]
    measured: tuple[str, ...]
    start: tuple[int, ...]
    """Centres at the start, one per power of POWERS."""
    centres: tuple[int, ...]
    """Centres at the end."""
    phase: str
    """The first phase that was not played any more; empty after a solo or a draw."""
    ended: str
    """horizon | won | drawn."""
    rejected: int
    """Orders that the game engine refused; 0 unless something is wrong."""


OnGame = Callable[[GameResult], None]
"""Told each game as it ends."""


def rounds_for(games: int) -> int:
    """Whole rounds that hold `games`."""
    return max(1, -(-games // GAMES_OF_A_ROUND))


def plan_match(settings: MatchSettings, rounds: int, held_out: Sequence[Snapshot] = ()) -> list[GamePlan]:
    """The games of `rounds` rounds, first round first.

    Raises:
        InputError: games from held-out positions are asked for, and there are none of them.
    """
    starts = _starts(settings, held_out)
    return [plan for number in range(rounds) for plan in _round(settings, number, starts[number % len(starts)])]


def _starts(settings: MatchSettings, held_out: Sequence[Snapshot]) -> list[Snapshot | None]:
    if settings.start == "standard":
        return [None]
    movements = [snapshot for snapshot in held_out if snapshot.phase_type == "M"]
    if not movements:
        raise InputError(
            "the run's state cache holds no held-out position of a movement phase to play from: "
            "play from the standard start, or build a cache with cache.held_out_snapshots"
        )
    return list(movements)


def _round(settings: MatchSettings, number: int, start: Snapshot | None) -> list[GamePlan]:
    tables = (
        [((name, *[settings.opponents] * 6), name) for name in settings.players]
        if settings.opponents
        else [(_dealt(settings.players, number), "")]
    )
    plans = []
    for turn in range(GAMES_OF_A_ROUND):
        for table, alone in tables:
            seats = {power: table[(seat + turn) % len(table)] for seat, power in enumerate(POWERS)}
            measured = POWERS[-turn % len(POWERS)]
            plans.append(
                GamePlan(
                    key=f"{number}/{turn}/{alone}" if alone else f"{number}/{turn}",
                    cluster=f"game {number}/{turn}" if start is None else start.game_id,
                    pair=f"{number}/{turn}",
                    start=start,
                    seats=seats,
                    measured=(measured,) if alone else POWERS,
                )
            )
    return plans


def _dealt(players: Sequence[str], number: int) -> tuple[str, ...]:
    """Seven seats dealt to the players in turn; the next round begins with the next player."""
    return tuple(players[(number + seat) % len(players)] for seat in range(len(POWERS)))


async def play_match(
    plans: Sequence[GamePlan],
    settings: MatchSettings,
    deciders: Mapping[str, Decider],
    on_game: OnGame | None = None,
) -> list[GameResult]:
    """Play the games, `settings.at_once` at a time; results in the order of the plans.

    Raises:
        EngineError: a game failed; a result over part of a round would be another result.
    """
    free = asyncio.Semaphore(settings.at_once)

    async def play(plan: GamePlan) -> GameResult:
        async with free:
            result = await play_game(plan, settings, deciders)
        if on_game is not None:
            on_game(result)
        return result

    return list(await asyncio.gather(*(play(plan) for plan in plans)))


async def play_game(plan: GamePlan, settings: MatchSettings, deciders: Mapping[str, Decider]) -> GameResult:
    """Play one game to a solo, or until its years are over."""
    board = Board.start() if plan.start is None else Board.restore(plan.start)
    luck = f"match/{settings.seed}/{plan.pair}"
    fork = await play_fork(
        ForkPlan(
            name=f"match/{settings.seed}/{plan.key}",
            shared_name=luck,
            dice=luck,
            seats=plan.seats,
            horizon_years=settings.years,
            temperature=1.0,
            snapshot_id="" if plan.start is None else plan.start.snapshot_id,
        ),
        board,
        None,
        None,
        deciders=deciders,
        record_plies=False,
    )
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
    )
