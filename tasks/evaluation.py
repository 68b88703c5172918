"""Evaluation tasks: a player against one kind of opponents, and the games of a match."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from prefect import task

from entente.evaluation.matches import GamePlan, GameResult, OnGame, play_match
from entente.evaluation.settings import EvaluationSettings, MatchSettings
from entente.evaluation.strength import Score, measure_strength
from entente.game.snapshot import Snapshot
from entente.inference.host import EngineHost
from entente.players.policy import Decider
from entente.telemetry.progress import reporter

_TOUCHED_EVERY_S = 60.0


@task(
    name="evaluate",
    task_run_name="evaluate-{label}-vs-{opponents}",
    persist_result=False,
    retries=0,
    tags=["evaluate"],
)
async def evaluate_player(
    label: str,
    player: str,
    opponents: str,
    positions: Sequence[Snapshot],
    settings: EvaluationSettings,
    host: EngineHost,
    decider: Decider | None = None,
    temperature: float = 1.0,
    touched: Path | None = None,
) -> Score:
    """Score `player`; see `measure_strength`. `label` names the task run. Finished forks update the time of `touched`, at most
    once a minute: a score writes its file at its end, and recovery would take a long one for a hang."""

    def on_fork(done: int, total: int) -> None:
        if touched is not None and time.time() - touched.stat().st_mtime > _TOUCHED_EVERY_S:
            os.utime(touched)
        reporter().stage(f"evaluating {label} against {opponents}", done, total)

    return await host.run(measure_strength(player, opponents, positions, settings, decider, on_fork, temperature))


@task(name="play-match", task_run_name="play-match-{label}", persist_result=False, retries=0, tags=["evaluate"])
async def play_games(
    host: EngineHost,
    label: str,
    plans: Sequence[GamePlan],
    settings: MatchSettings,
    deciders: Mapping[str, Decider],
    on_game: OnGame,
) -> list[GameResult]:
    return await host.run(play_match(plans, settings, deciders, on_game))
