"""The evaluation task: one player against one kind of opponents on the held-out positions."""

from collections.abc import Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from evaluation.settings import EvaluationSettings
from evaluation.strength import POLICY, Score, measure_strength
from game.snapshot import Snapshot
from inference.engine import Engine
from inference.host import EngineHost
from rollouts.fork import Tokens
from telemetry.progress import reporter


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
) -> Score:
    """Score `player` (the policy as the engine serves it, or a scripted one), called `label` in the run's names."""
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
        )
    )
