"""Flow: train a policy. The main job, from top to bottom.

    open ─▶ score the base ─▶ [ roll out ─▶ train ─▶ publish ] per step ─▶ score what was learned

Rollouts of `buffer_depth` steps are in flight while the trainer trains; everything that must survive lies in files,
never in Prefect.
"""

import json
import time
from typing import Any

from prefect import flow

from evaluation.strength import POLICY, Score
from flows.keep_ahead import RolloutsAhead
from flows.open_run import named, open_run
from flows.run_settings import RunSettings
from flows.step_figures import StepClock
from storage.runs import durable_write
from tasks.evaluation import evaluate_player
from tasks.resources import Resources
from tasks.training import check_mismatch, train_step
from telemetry.progress import reporter
from telemetry.sinks import MetricLog


@flow(name="train-policy", flow_run_name="train-{settings.run}")
async def train_policy(settings: RunSettings) -> dict[str, Any]:
    """Train `settings.steps` steps and return the summary that is also written to the run's `summary.json`."""
    began, settings = time.monotonic(), named(settings)
    async with open_run(settings) as resources:
        configuration = settings.model_dump(mode="json")
        with MetricLog(resources.paths.metrics, settings.run, settings.telemetry, configuration) as log:
            scores = await _score(resources, settings, "base")
            clock = StepClock(resources, await resources.host.run(resources.engine.stats()))
            async with RolloutsAhead(resources, settings.pipeline, settings.steps) as ahead:
                for step in range(1, settings.steps + 1):
                    ahead.top_up(step)
                    reporter().waiting("rollouts")
                    rolled = await ahead.take(step)
                    if step == 1:
                        log.log(0, await check_mismatch(resources))
                    reporter().waiting("")
                    trained = await train_step(resources, step)
                    await resources.serve(trained.version, trained.adapter, trained.adapter_hash)
                    figures = await clock.end_step(rolled, trained)
                    log.log(step, figures)
                    reporter().step(step, settings.steps, figures)
            scores |= await _score(resources, settings, "trained")
            scores |= await _score_scripted(resources, settings)
            log.log(
                settings.steps + 1,
                {f"score/{name}": scores[name].mean for name in ("base", "trained", "random", "teacher")},
            )
        summary = _summary(settings, scores, clock, time.monotonic() - began)
        durable_write(resources.paths.root / "summary.json", json.dumps(summary, indent=1).encode())
    return summary


async def _score(resources: Resources, settings: RunSettings, label: str) -> dict[str, Score]:
    """The served version against each kind of opponents; the first bears the bare label."""
    scores = {}
    for place, opponents in enumerate(settings.evaluation.opponents):
        score = await evaluate_player(
            label,
            POLICY,
            opponents,
            resources.cache.held_out,
            settings.evaluation,
            resources.host,
            resources.engine,
            resources.tokens,
        )
        scores[label if place == 0 else f"{label}_vs_{opponents}"] = score
    return scores


async def _score_scripted(resources: Resources, settings: RunSettings) -> dict[str, Score]:
    """Random play and the imitated teacher, scored in the same way."""
    opponents, held_out = settings.evaluation.opponents[0], resources.cache.held_out
    players = {"random": "random", "teacher": settings.tiny_model.teacher}
    return {
        label: await evaluate_player(label, player, opponents, held_out, settings.evaluation, resources.host, None, None)
        for label, player in players.items()
    }


def _summary(settings: RunSettings, scores: dict[str, Score], clock: StepClock, wall_s: float) -> dict[str, Any]:
    rejected = clock.orders_rejected + sum(score.orders_rejected for score in scores.values())
    summary: dict[str, Any] = {}
    for label, score in scores.items():
        name = label.replace("_vs_", "_score_vs_") if "_vs_" in label else f"{label}_score"
        summary[name] = round(score.mean, 4)
        if label.startswith(("base", "trained")):
            summary[name.replace("_score", "_ci")] = [round(end, 4) for end in score.interval]
    return summary | {
        "steps": settings.steps,
        "wall_s": round(wall_s, 1),
        "decisions": clock.decisions,
        "max_policy_lag_seen": clock.max_policy_lag,
        "orders_rejected": rejected,
        "orchestration_share": round(clock.orchestration_share, 4),
        "run": str(settings.paths.root),
    }
