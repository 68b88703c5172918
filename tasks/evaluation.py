"""Evaluation tasks: a player against one kind of opponents, and the games of a match."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import WorkerStatus
from prefect.deployments import arun_deployment
from prefect.exceptions import ObjectNotFound

from evaluation.matches import GamePlan, GameResult, OnGame, play_match
from evaluation.settings import EvaluationSettings, MatchSettings
from evaluation.strength import POLICY, Score, measure_strength
from game.snapshot import Snapshot
from inference.engine import Engine
from inference.host import EngineHost
from rollouts.deciders import Decider, Tokens
from telemetry.progress import GameProgress, reporter

DEPLOYMENT = "evaluate-policy/measure-strength"
"""The deployment that measures versions while a run trains."""
_ANSWERS_WITHIN_S = 30.0


async def has_evaluation_worker() -> bool:
    """Whether the Prefect server has the deployment and an online worker for it."""
    try:
        async with get_client() as client:
            deployment = await client.read_deployment_by_name(DEPLOYMENT)
            if deployment.work_pool_name is None or deployment.paused:
                return False
            workers = await client.read_workers_for_work_pool(deployment.work_pool_name)
    except ObjectNotFound:
        return False
    except Exception as error:  # a failing server must not end a run
        reporter().say(f"Prefect could not be asked whether '{DEPLOYMENT}' can run ({_one_line(error)})")
        return False
    return any(worker.status is WorkerStatus.ONLINE for worker in workers)


async def start_evaluation(run: str, version: int, runs_root: Path) -> str:
    """Start a flow run of the deployment that stores the version's point, without waiting for it.

    Returns:
        The reason if it was refused; empty if it was started.
    """
    asked = {"run": run, "version": version, "runs_root": str(runs_root), "track": True}
    try:
        begun = arun_deployment(DEPLOYMENT, parameters=asked, timeout=0, as_subflow=False, tags=["entente", "evaluate"])
        await asyncio.wait_for(begun, _ANSWERS_WITHIN_S)
    except Exception as error:  # the caller measures the version itself
        return _one_line(error)
    return ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@task(
    name="evaluate",
    task_run_name="evaluate-{label}-vs-{opponents}",
    cache_policy=NO_CACHE,
    persist_result=False,
    tags=["evaluate"],
)
async def evaluate_player(
    label: str,
    player: str,
    opponents: str,
    positions: Sequence[Snapshot],
    settings: EvaluationSettings,
    host: EngineHost,
    engine: Engine | None,
    tokens: Tokens | None,
    decider: Decider | None = None,
    temperature: float = 1.0,
) -> Score:
    """Score `player`: the policy that the engine serves, a scripted player, or `decider`. `label` names the task run."""
    who = f"{label} against {opponents}"
    policy = player == POLICY
    return await host.run(
        measure_strength(
            player,
            opponents,
            positions,
            settings,
            engine if policy else None,
            tokens if policy else None,
            lambda done, total: reporter().stage(f"evaluating {who}", done, total),
            decider,
            temperature,
        )
    )


@task(name="play-match", task_run_name="play-match-{label}", cache_policy=NO_CACHE, persist_result=False, tags=["evaluate"])
async def play_games(
    host: EngineHost,
    label: str,
    plans: Sequence[GamePlan],
    settings: MatchSettings,
    deciders: Mapping[str, Decider],
    on_game: OnGame,
) -> list[GameResult]:
    """Play the given games of a match. `on_game` is called with each result."""
    progress = GameProgress(f"playing {len(plans)} games", len(plans), settings.years)
    return await host.run(play_match(plans, settings, deciders, on_game, progress))
