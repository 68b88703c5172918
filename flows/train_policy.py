"""Flow: train a policy.

    open ─▶ score the base ─▶ steps ─▶ score the trained policy

    step s:   take ─────────▶ check_agreement ─▶ play_ahead ─▶ train_step ─▶ hand_over
              waits for the   compares trainer   starts        in the        publishes version s, which
              rollouts of s   and engine, if     rollouts up   trainer's     later rollouts sample from; waits
              or, ahead, for  due; else nothing  to s + depth; process       for the engines only if nothing
              enough rows                        no waiting                  plays ahead, or s is scored

All state is in files, never in Prefect: with `resume` the same flow continues from those files, however the run ended.
`tasks/rollout_queue.py` decides how rollouts and training overlap.
"""

import asyncio
import time
from contextlib import nullcontext
from typing import Any

from prefect import flow

from entente.settings.cache_version import with_cache_version
from entente.settings.run_settings import RunSettings
from entente.telemetry.memory import freeze_old_objects
from entente.telemetry.progress import reporter
from entente.telemetry.sinks import MetricLog
from flows.build_state_cache import show_refresh
from flows.given_parameters import PINNED, check_parameters, named_after
from flows.open_run import begun_run, finished_summary, open_queue, open_run
from flows.score_policy import due, earlier_seconds, missed, run_summary, score_policy, score_scripted, score_version
from storage.files import file_marks
from storage.json_files import write_json
from storage.ledger import count_run
from storage.retention import drop_old_adapters
from tasks.alerts import AlertDesk
from tasks.artifacts import RunPage, show_result, write_report_page
from tasks.open_objects import OpenRun
from tasks.rollout_queue import RolloutQueue
from tasks.step_figures import StepClock
from tasks.train_policy import check_agreement, forget_finished_tasks, quoted, train_step

_CLEAR_EVERY = 20
"""Steps between removals of old adapters and shards, and of Prefect's records of finished tasks."""


@flow(name="train-policy", flow_run_name=named_after("train", "settings", "run"), **PINNED)
async def train_policy(settings: RunSettings, resume: bool = False) -> dict[str, Any]:
    """Train `settings.steps` steps and return the summary that is also written to the run's `summary.json`.

    Args:
        settings: All settings of the run.
        resume: Continue the run `settings.run` from its newest step.
    """
    check_parameters(settings.runs_root, settings=settings)
    began = time.monotonic()
    settings, resume = begun_run(settings, resume=resume)
    settings = with_cache_version(settings, resume=resume)
    report = settings.paths.root / "report.html"
    if resume and (summary := finished_summary(settings)) is not None:
        if settings.telemetry.report and (file_marks(report) or (0, 0))[1] < settings.paths.summary.stat().st_mtime_ns:
            await write_report_page(settings.paths)  # the run was killed before it did
        return summary
    async with open_run(settings, resume=resume) as resources:
        if settings.cache.from_run:
            await show_refresh(settings.runs_root, settings.cache)
        scores = await score_policy(resources, settings, "base")
        with open_log(resources, settings) as log, freeze_old_objects():
            await _train_steps(resources, settings, log)
            scores |= await score_policy(resources, settings, "trained")
            scores |= await score_scripted(resources, settings)
            log.log(settings.steps + 1, {f"score/{name}": score.mean for name, score in scores.items() if "_vs_" not in name})
        totals = await asyncio.to_thread(count_run, resources.paths)
        wall_s = time.monotonic() - began + earlier_seconds(resources.paths, resources.resume_point.step_done)
        summary = run_summary(settings, totals, scores, wall_s)
        write_json(resources.paths.summary, summary)
    if scores:
        await show_result(settings.paths, summary)
    if settings.telemetry.report:
        await write_report_page(settings.paths)
    await asyncio.to_thread(log.finish, report)
    return summary


async def _train_steps(resources: OpenRun, settings: RunSettings, log: MetricLog) -> None:
    """Roll out, train and publish, step by step."""
    first_step = resources.resume_point.step_done + 1
    page = RunPage(settings.paths.root, settings.steps, done=first_step - 1)
    desk = AlertDesk(resources.paths, max_policy_lag=settings.storage.max_policy_lag, done=first_step - 1)
    async with page, desk, open_queue(settings, resources) as queue:
        late = await _score_missed(resources, settings, queue)
        clock = StepClock(resources, await resources.host.run(resources.engine.stats()))
        for step in range(first_step, settings.steps + 1):
            # Before the first step nothing was played ahead, so this wait does not depend on measured time.
            async with resources.engine_alone() if step == 1 else nullcontext():
                rollouts = await queue.take(step)
            figures, late = late | await check_agreement(resources, queue, settings, step), {}
            if step == 1:
                log.log(0, figures)
            queue.play_ahead(step)
            trained = await train_step(quoted(resources), step)
            await queue.hand_over(asyncio.create_task(resources.saved()), at_once=due(settings, step))
            if due(settings, step):
                figures |= await score_version(resources, settings, step)
            figures |= await clock.end_step(rollouts, trained)
            for sink in (log.log, desk.step, page.step):
                sink(step, figures)
            reporter().step(step, settings.steps, figures)
            if step % _CLEAR_EVERY == 0:
                forget_finished_tasks()
                await asyncio.to_thread(drop_old_adapters, resources.paths, settings.retention)
                await asyncio.to_thread(resources.trainer.retire, settings.retention)


async def _score_missed(resources: OpenRun, settings: RunSettings, queue: RolloutQueue) -> dict[str, float]:
    if not missed(resources, settings):
        return {}
    await queue.catch_up(resources.resume_point.step_done)
    return await score_version(resources, settings, resources.resume_point.step_done)


def open_log(resources: OpenRun, settings: RunSettings) -> MetricLog:
    """Open the run's metrics, drop those after its newest step, and add those of that step if a kill prevented it."""
    resume_point, configuration = resources.resume_point, settings.model_dump(mode="json")
    log = MetricLog(
        resources.paths.metrics,
        settings.run,
        settings.telemetry,
        configuration,
        keep_to=resume_point.step_done or -1,
    )
    if resume_point.metrics and log.last_step < resume_point.step_done:
        log.log(resume_point.step_done, resume_point.metrics)
    return log
