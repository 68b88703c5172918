"""Flow: train a policy. The main job, from top to bottom.

    open ─▶ score the base ─▶ [ roll out ─▶ train ─▶ publish ] per step ─▶ score what was learned

Rollouts of `buffer_depth` steps are in flight while the trainer trains (`flows/in_flight/rollout_queue.py` tells by which
version, and who waits for whom); everything that must survive lies in files, never in Prefect: with `resume` the same flow
goes on where those files stand, whatever ended it.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from prefect import flow

from evaluation.strength import Score
from flows.given_parameters import check_given
from flows.in_flight.choose_source import rollout_source
from flows.in_flight.producer_fleet import ProducerFleet
from flows.in_flight.publisher import Publisher, serve_where_it_stands
from flows.in_flight.rollout_queue import RolloutQueue
from flows.in_flight.step_figures import StepClock, producer_figures, seen_in
from flows.open_run import finished_summary, named, open_run
from flows.run_names import training_name
from flows.run_settings import RunSettings
from flows.score_policy import score_policy, score_scripted
from flows.settings_form import SettingsParameter
from flows.track_strength import StrengthTrack
from game.players import PLAYERS
from storage.retention import drop_old_adapters
from storage.runs import durable_write
from storage.totals import Totals
from tasks.alerts import AlertDesk
from tasks.artifacts import RunPage, show_result
from tasks.replayed_rollouts import IdleEngine
from tasks.report import write_report_page
from tasks.resources import Resources
from tasks.rollouts import roll_out_probe
from tasks.run_tables import step_tables
from tasks.training import check_mismatch, has_fresh_rows, train_step
from telemetry.memory import what_stands_stays
from telemetry.progress import reporter
from telemetry.sinks import MetricLog

_CLEAR_EVERY = 20
"""Steps between two looks at which old adapters and shards may go."""


@flow(name="train-policy", flow_run_name=training_name)
async def train_policy(settings: SettingsParameter, resume: bool = False, fork_lineage: str = "") -> dict[str, Any]:
    """Train `settings.steps` steps and return the summary that is also written to the run's `summary.json`.

    Args:
        settings: Everything that shapes the run.
        resume: Go on with the run that `settings.run` names, after its newest step.
        fork_lineage: With `resume`, go on in a new lineage of this name, whose settings may be others.
    """
    check_given(settings.runs_root, settings=settings)
    began, settings = time.monotonic(), named(settings)
    if resume and (summary := finished_summary(settings)) is not None:
        return summary
    async with open_run(settings, resume=resume, fork_lineage=fork_lineage) as resources:
        standing = resources.standing
        scores = await score_policy(resources, settings, "base")
        held_back = await serve_where_it_stands(resources, one_behind=settings.pipeline.one_behind)
        with _open_log(resources, settings) as log, what_stands_stays():
            clock = StepClock(resources, await resources.host.run(resources.engine.stats()))
            page, track = RunPage(settings.run, settings.steps), StrengthTrack(resources, settings)
            desk = AlertDesk(resources.paths, settings.alerts, max_policy_lag=settings.storage.max_policy_lag)
            async with (
                page,
                desk,
                ProducerFleet(resources, settings) as fleet,
                _queue(resources, settings, fleet) as queue,
                Publisher(resources, queue, held_back) as publisher,
            ):
                for step in range(standing.step_done + 1, settings.steps + 1):
                    reporter().waiting("rollouts")
                    rolled = await queue.take(step)
                    await publisher.release()
                    agreement = await _agreement(resources, queue, settings, step)
                    if step == 1:
                        log.log(0, agreement)
                    reporter().waiting("")
                    queue.play_ahead(step)
                    trained = await train_step(resources, step)
                    if settings.pipeline.one_behind:
                        publisher.hold(trained)
                    else:
                        await publisher.publish(trained, at_once=not settings.pipeline.buffer_depth or track.due(step))
                    if track.due(step):
                        if settings.pipeline.one_behind:
                            await queue.all_played()
                            await publisher.release()
                        await track.measure(step)
                    figures = agreement | await clock.end_step(rolled, trained)
                    figures |= producer_figures(fleet.standing()) | track.figures()
                    await fleet.ask_for(queue.learn(seen_in(figures)).producers)
                    log.log(step, figures)
                    reporter().step(step, settings.steps, figures)
                    page.step(step, figures)
                    desk.step(step, figures)
                    if step % _CLEAR_EVERY == 0:
                        await asyncio.to_thread(drop_old_adapters, resources.paths, settings.retention)
                        await asyncio.to_thread(resources.trainer.retire, settings.retention)
            scores |= await score_policy(resources, settings, "trained")
            scores |= await score_scripted(resources, settings)
            log.log(
                settings.steps + 1,
                {f"score/{name}": scores[name].mean for name in ("base", "trained", *PLAYERS, "teacher") if name in scores},
            )
        totals = await asyncio.to_thread(resources.trainer.totals)
        summary = _summary(settings, totals, scores, clock, time.monotonic() - began)
        durable_write(resources.paths.summary, json.dumps(summary, indent=1).encode())
    if scores:
        await show_result(settings.paths, summary, scores)
    if settings.telemetry.report:
        await write_report_page(settings.paths)
    await asyncio.to_thread(log.finish, settings.paths.root / "report.html")
    return summary


def _open_log(resources: Resources, settings: RunSettings) -> MetricLog:
    """The run's figures, cut back to its newest step; that step's own are written if a kill came before they could be."""
    standing, configuration = resources.standing, settings.model_dump(mode="json")
    log = MetricLog(
        resources.paths.metrics,
        settings.run,
        settings.telemetry,
        configuration,
        keep_to=standing.step_done or -1,
        tables=partial(step_tables, resources.paths),
    )
    if standing.metrics and log.last_step < standing.step_done:
        log.log(standing.step_done, standing.metrics)
    return log


@asynccontextmanager
async def _queue(resources: Resources, settings: RunSettings, fleet: ProducerFleet) -> AsyncIterator[RolloutQueue]:
    """The run's rollouts, from wherever its settings say."""
    standing = resources.standing
    async with (
        rollout_source(settings, resources) as source,
        RolloutQueue(
            resources,
            source,
            settings.pipeline,
            settings.steps,
            step_done=standing.step_done,
            elsewhere=lambda: fleet.standing().in_flight,
        ) as queue,
    ):
        yield queue


async def _agreement(resources: Resources, queue: RolloutQueue, settings: RunSettings, step: int) -> dict[str, float]:
    """Refuse to train `step`, where a look is due, unless trainer and engine agree on rows of the version that both hold now; how
    closely they do."""
    pipeline, every = settings.pipeline, settings.training.mismatch_every
    begins = step == resources.standing.step_done + 1
    if not begins and not (pipeline.buffer_depth and every and step % every == 0):
        return {}  # without a buffer every step shows it on its own rows
    if not await has_fresh_rows(resources):
        if not begins and not pipeline.one_behind:
            return {}  # nobody stops for it what is in flight
        # Rollouts ran ahead: none of what is published was drawn by the trainer's version.
        await queue.all_played()
    if not await has_fresh_rows(resources):
        if isinstance(resources.engine, IdleEngine):
            return {}  # nobody can draw: its rows were compared when it began
        await roll_out_probe(resources, step - 1)
    return await check_mismatch(resources)


def _summary(settings: RunSettings, totals: Totals, scores: dict[str, Score], clock: StepClock, wall_s: float) -> dict[str, Any]:
    """The run in figures; what was played and trained is counted from its files, whichever process made them."""
    summary: dict[str, Any] = {}
    if settings.simulated.from_run:
        summary["simulated_from"] = settings.simulated.from_run
    if "base" in scores:
        summary |= {"positions": scores["base"].positions, "source_games": scores["base"].source_games}
    for label, score in scores.items():
        name = label.replace("_vs_", "_score_vs_") if "_vs_" in label else f"{label}_score"
        summary[name] = round(score.mean, 4)
        if label.startswith(("base", "trained")):
            summary[name.replace("_score", "_ci")] = score.estimate.rounded()
    return summary | {
        "steps": settings.steps,
        "wall_s": round(wall_s, 1),
        "decisions": totals.decisions,
        "max_policy_lag_seen": totals.max_policy_lag,
        "orders_rejected": totals.orders_rejected + sum(score.orders_rejected for score in scores.values()),
        "orchestration_share": round(clock.orchestration_share, 4),
        "run": str(settings.paths.root),
    }
