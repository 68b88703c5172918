"""Plays a match: plans the games, reads those already played, plays the rest, and writes the table."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from entente.evaluation.contestants import Contestant, check_play_is_used, check_searches, resolve_contestants
from entente.evaluation.match_files import (
    MatchRecord,
    answers_file,
    append_game,
    match_label,
    read_games,
    read_match,
    write_match,
)
from entente.evaluation.match_table import MEASURES, conclusions, match_table
from entente.evaluation.matches import DEFAULT_GAMES, GamePlan, GameResult, plan_match, rounds_for
from entente.evaluation.protocols import check_protocol
from entente.evaluation.settings import MatchSettings
from entente.game.snapshot import Snapshot
from entente.players.endpoint_players import EndpointPlayers
from entente.settings.layers import settings_of
from entente.telemetry.errors import InputError
from entente.telemetry.machine import cpu_seconds, environment
from entente.telemetry.progress import reporter
from flows.open_players import open_players
from flows.open_run import prepare_cache
from storage.files import durable_write
from storage.runs import RunPaths, matches_folder
from tasks.artifacts import show_sentences
from tasks.evaluation import play_games


async def play_match_of(run: str, runs_root: Path, match: MatchSettings) -> dict[str, Any]:
    """Play the match's missing games, and return its table as plain values. `run` is empty if no version of a run plays.
    Raises InputError for unknown players, runs that cannot play each other, or no held-out positions."""
    settings = settings_of(RunPaths(runs_root / run)) if run else None
    folder = matches_folder(run, runs_root)
    players = resolve_contestants(match.players, run, runs_root)
    others = resolve_contestants((match.opponents,), run, runs_root) if match.opponents else []
    match = match.model_copy(
        update={"players": tuple(player.name for player in players), "opponents": others[0].name if others else ""}
    )
    everybody = [*players, *(other for other in others if other.name not in match.players)]
    # Prefect's form sends the defaults too.
    check_play_is_used(everybody, MatchSettings.model_validate(match.model_dump(exclude_defaults=True)))
    check_searches(everybody, match)
    check_protocol(match)
    held_out: Sequence[Snapshot] = ()
    if match.start == "held-out":
        if settings is None:
            raise InputError("games from held-out positions need a run with such positions: name it with --run")
        held_out = (await prepare_cache(settings.model_copy(update={"runs_root": runs_root}))).held_out
    label = match_label(match, everybody, held_out)
    done = read_games(folder, label)
    plans = plan_match(match, rounds_for(match.games or DEFAULT_GAMES), held_out)
    for key in [key for key in done if key not in {plan.key for plan in plans}]:
        del done[key]
    missing = [plan for plan in plans if plan.key not in done]
    spent = 0.0
    if missing:
        spent = await _play(folder, label, match, everybody, runs_root, missing, done)
    table = match_table([replace(done[plan.key], cluster=plan.cluster) for plan in plans], match)
    before = read_match(file) if (file := folder / f"{label}.json").is_file() else None
    record = MatchRecord(
        label=label,
        settings=match,
        players=tuple(everybody),
        table=table,
        cpu_seconds_a_game=round(spent / len(missing), 3) if missing else before.cpu_seconds_a_game if before else 0.0,
        finished=before.finished if before and not missing else round(time.time(), 3),
        environment=environment(),
    )
    if before is not None and before.table.games > table.games:
        reporter().say(f"{file} keeps its {before.table.games} games; the table here is of {table.games}")
        plot = ""
    else:
        write_match(folder, record)
        plot = await asyncio.to_thread(_write_plot, folder / f"{label}.svg", record)
    sentences = conclusions(table, match)
    words = f"{run or 'match'}: {table.games} games, {match.description}; measured: {MEASURES[match.measure][0]}"
    await show_sentences(f"match-{run and run + '-'}{label[-8:]}", words, lambda: [_measures(record), *sentences])
    return {
        "run": run,
        "match": label,
        "how": match.description,
        "cpu_seconds_a_game": record.cpu_seconds_a_game,
        "notes": sentences,
        "plot": plot,
    } | asdict(table)


def _measures(record: MatchRecord) -> str:
    from entente.reports.published_figures import measures_table  # loads DuckDB

    return measures_table(record.table)


def _write_plot(file: Path, record: MatchRecord) -> str:
    from entente.reports.drawing import stand_alone
    from entente.reports.plots import match_by_year

    if sampled := match_by_year(record):
        durable_write(file, stand_alone(sampled).encode())
    return str(file) if sampled else ""


async def _play(
    folder: Path,
    label: str,
    match: MatchSettings,
    players: Sequence[Contestant],
    runs_root: Path,
    missing: Sequence[GamePlan],
    done: dict[str, GameResult],
) -> float:
    """Play the missing games; add them to `done` and to the match's file. Returns CPU seconds: this process without engine
    start, and the processes that ended with the match."""
    if done:
        reporter().say(f"{len(done)} games of this match exist already; playing {len(missing)}")
    endpoints = [player.name for player in players if player.is_endpoint]
    endpoint = EndpointPlayers(endpoints, answers_file(folder, label), match.endpoint)
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(open_players(players, runs_root, match))
        began = cpu_seconds()

        def on_game(game: GameResult) -> None:
            done[game.key] = game
            append_game(folder, label, game)

        try:
            await play_games(opened.host, label, missing, match, {**opened.deciders, **endpoint.deciders}, on_game)
        finally:
            await opened.host.run(endpoint.close())
    return cpu_seconds() - began
