"""Plays a match: counts the games, reads those already played, plays the rest, and writes the table."""

import math
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from evaluation.contestants import Contestant, check_searches, resolve_contestants
from evaluation.intervals import Estimate, format_interval
from evaluation.match_files import (
    MatchRecord,
    answers_file,
    append_game,
    match_label,
    read_games,
    write_match,
)
from evaluation.match_table import MEASURES, MatchTable, cluster_noun, games_for_width, match_table
from evaluation.matches import DEFAULT_GAMES, GAMES_PER_ROUND, GamePlan, GameResult, plan_match, play_match, rounds_for
from evaluation.protocols import check_protocol, part_of_protocol
from evaluation.settings import MatchSettings
from flows.open_players import open_players
from flows.open_run import prepare_cache
from game.players import SEARCHES
from game.snapshot import Snapshot
from outside.players import OutsidePlayers
from outside.reading import AnswerCounts
from pipeline.run_settings import settings_of
from storage.runs import RunPaths, matches_folder
from tasks.artifacts import show_table
from tasks.evaluation import play_games
from telemetry.errors import InputError
from telemetry.machine import environment
from telemetry.progress import reporter

_PILOT_ROUNDS = 6
_STAND_IN = "mover"
"""Scripted player that replaces policy versions in a pilot, while none of their games are known. Nobody searches there."""


async def play_match_of(run: str, runs_root: Path, match: MatchSettings) -> dict[str, Any]:
    """Play the games of the match that are missing, and return its table as plain values.

    Args:
        run: Name of the run that the versions and the match's files belong to; empty: no version of a run plays.

    Raises:
        InputError: unknown players, runs that cannot play each other, no held-out positions, or too few games for the width.
    """
    settings = settings_of(RunPaths(runs_root / run)) if run else None
    folder = matches_folder(run, runs_root)
    players = resolve_contestants(match.players, run, runs_root)
    others = resolve_contestants((match.opponents,), run, runs_root) if match.opponents else []
    match = match.model_copy(
        update={"players": tuple(player.name for player in players), "opponents": others[0].name if others else ""}
    )
    everybody = [*players, *(other for other in others if other.name not in match.players)]
    check_searches(everybody, match)
    check_protocol(match)
    held_out: Sequence[Snapshot] = ()
    if match.start == "held-out":
        if settings is None:
            raise InputError("games from held-out positions need a run that has some: name it with --run")
        held_out = (await prepare_cache(settings.model_copy(update={"runs_root": runs_root}))).held_out
    label = match_label(match, everybody)
    done = read_games(folder, label)
    rounds = rounds_for(await count_games(match, held_out, list(done.values())))
    plans = plan_match(match, rounds, held_out)
    for key in [key for key in done if key not in {plan.key for plan in plans}]:
        del done[key]
    missing = [plan for plan in plans if plan.key not in done]
    seconds = 0.0
    if missing:
        seconds = await _play(folder, label, match, everybody, runs_root, missing, done)
    table = match_table([replace(done[plan.key], cluster=plan.cluster) for plan in plans], match)
    record = MatchRecord(
        label=label,
        settings=match,
        players=tuple(everybody),
        table=table,
        seconds=round(seconds, 1),
        environment=environment(),
    )
    write_match(folder, record)
    words = f"{run or 'match'}: {table.games} games, {_how(match)}; measured: {MEASURES[match.measure][0]}"
    await show_table(f"match-{run and run + '-'}{label[-8:]}", words, table_rows(table))
    return {
        "run": run,
        "match": label,
        "how": _how(match),
        "seconds": record.seconds,
        "told": conclusions(table, match),
    } | _plain(table)


async def count_games(match: MatchSettings, held_out: Sequence[Snapshot], done: Sequence[GameResult]) -> int:
    """Number of games. Reports how many games the wanted width of the interval takes.

    Raises:
        InputError: `match.games` is smaller than the width takes.
    """
    if not match.width:
        return match.games or DEFAULT_GAMES
    seen, basis = list(done), "by the games played so far"
    if len({result.cluster for result in seen}) < _PILOT_ROUNDS:
        seen, basis = await _pilot(match, held_out), f"by a pilot in which '{_STAND_IN}' replaces policy versions"
    needed = games_for_width(seen, match)
    reporter().say(f"an interval of {match.width:g} ({match.measure}) takes about {needed} games, {basis}")
    if match.games and match.games < needed:
        raise InputError(
            f"{match.games} games are too few for an interval of {match.width:g} ({match.measure}): about {needed} are needed, "
            f"{basis}; ask for --games {needed}, or for a wider --width"
        )
    return max(needed, match.games)


async def _pilot(match: MatchSettings, held_out: Sequence[Snapshot]) -> list[GameResult]:
    """Play a few rounds with scripted players, to estimate the spread of results before an engine is started."""
    names = {name: name.removesuffix(SEARCHES) for name in (*match.players, match.opponents)}
    stand_ins = {name: _STAND_IN if plain[:1] == "v" or ":" in plain or "/" in plain else plain for name, plain in names.items()}
    plans = plan_match(match, _PILOT_ROUNDS, held_out)
    played = await play_match([_with_seats(plan, stand_ins) for plan in plans], match, {})
    by_key = {plan.key: plan for plan in plans}
    return [_named_as(result, by_key[result.key]) for result in played]


def _with_seats(plan: GamePlan, stand_ins: dict[str, str]) -> GamePlan:
    return replace(plan, seats={power: stand_ins.get(who, who) for power, who in plan.seats.items()})


def _named_as(result: GameResult, plan: GamePlan) -> GameResult:
    return replace(result, seats=plan.seats)


async def _play(
    folder: Path,
    label: str,
    match: MatchSettings,
    players: Sequence[Contestant],
    runs_root: Path,
    missing: Sequence[GamePlan],
    done: dict[str, GameResult],
) -> float:
    """Play the missing games; add them to `done` and to the match's file. Returns the seconds without engine starts."""
    if done:
        reporter().say(f"{len(done)} games of this match are there already; {len(missing)} are played")
    endpoints = [player.name for player in players if player.is_endpoint]
    outside = OutsidePlayers(endpoints, answers_file(folder, label), match.outside)
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(open_players(players, runs_root, match))
        began = time.monotonic()

        def on_game(game: GameResult) -> None:
            done[game.key] = game
            append_game(folder, label, game)

        try:
            await play_games(opened.host, label, missing, match, {**opened.deciders, **outside.deciders}, on_game)
        finally:
            await opened.host.run(outside.close())
        return time.monotonic() - began


def conclusions(table: MatchTable, match: MatchSettings) -> list[str]:
    """Sentences: which differences between players the figures show, and which they do not."""
    said = [part_of_protocol(match)] if part_of_protocol(match) else []
    said += table.answer_sentences
    for pair in table.pairs:
        interval = pair.difference.describe("+.3f", cluster_noun(match, pairs=True))
        figures = f"by {pair.difference.mean:+.3f} ({match.measure}), {interval}"
        if pair.shown:
            word = "better" if pair.difference.mean > 0 else "worse"
            said.append(f"{pair.player} plays {word} than {pair.other}: {figures}")
        else:
            enough = f"; about {pair.games_to_show} games would show one of this size" if pair.games_to_show else ""
            said.append(f"no difference between {pair.player} and {pair.other} is shown: {figures}{enough}")
    if match.width:
        for standing in table.players:
            estimate = standing.measures[match.measure]
            if estimate.interval is None:
                said.append(f"{standing.player} has {estimate.describe('.3f', cluster_noun(match))}")
            elif (width := estimate.interval[1] - estimate.interval[0]) > match.width:
                more = math.ceil(table.games * (width / match.width) ** 2 / GAMES_PER_ROUND) * GAMES_PER_ROUND
                said.append(f"the interval of {standing.player} is {width:.3f} wide, more than {match.width:g}: --games {more}")
    return said


def default_orders(counts: AnswerCounts | None) -> str:
    """Share of an endpoint's orders that it did not give, so that default orders were played; empty for other players."""
    return "" if counts is None else f"{counts.missing / max(1, counts.orders):.1%}"


def table_rows(table: MatchTable) -> list[dict[str, str]]:
    """One row for each player: measures with their intervals, and rating."""

    def words(name: str, each: Estimate) -> str:
        form = ".2f" if name in ("centres", "gained") else ".1%"
        return f"{each.mean:{form}} {format_interval(each.interval, form)}"

    return [
        {"player": standing.player, "seats": str(standing.seats)}
        | {name: words(name, each) for name, each in standing.measures.items()}
        | ({"default orders": default_orders(table.answers.get(standing.player))} if table.answers else {})
        | {"rating": "" if math.isnan(standing.rating) else f"{standing.rating:.1f} ± {2 * standing.rating_spread:.1f}"}
        for standing in table.players
    ]


def _how(match: MatchSettings) -> str:
    seats = f"one seat against six of '{match.opponents}'" if match.opponents else "all players at one table"
    start = "spring 1901" if match.start == "standard" else "held-out positions"
    how = match.how((*match.players, match.opponents))
    return f"{seats}, from {start}, {match.years} years{how and '; ' + how}"


def _plain(table: MatchTable) -> dict[str, Any]:
    plain = asdict(table)
    for player in plain["players"]:
        if math.isnan(player["rating"]):
            player["rating"] = player["rating_spread"] = None
    return plain
