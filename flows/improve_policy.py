"""Flow: improve a run's policy by search.

    open ─▶ [ visit ─▶ label ─▶ learn ─▶ score ] per round

A round visits positions that the newest version reaches, labels them by search in processes on all cores, trains steps on
these distillation targets, and scores the new version, which visits next. Visits and labelling overlap; the student changes
only after the round's last label. All state is in files, so the same command continues however the flow ended.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

from prefect import flow

from entente.evaluation.intervals import format_interval
from entente.records.policy_version import BASE, PolicyVersion
from entente.rollouts.figures import Figures
from entente.rollouts.groups import GroupRange
from entente.rollouts.improve_rounds import (
    ImproveSettings,
    begin_round,
    check_improve,
    check_student,
    end_round,
    open_rounds,
    results,
    round_name,
)
from entente.rollouts.teach import VISITED_GROUPS
from entente.settings.layers import settings_of
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import DataError
from entente.telemetry.machine import usable_cores
from entente.telemetry.memory import freeze_old_objects
from entente.telemetry.process_pool import ProcessPool
from entente.telemetry.progress import reporter
from entente.telemetry.sinks import MetricLog
from flows.given_parameters import PINNED, check_parameters, named_after
from flows.open_run import open_run
from flows.score_policy import score_version
from flows.train_policy import open_log
from storage.distil_store import DistilQuery, distil_targets_in_use
from storage.files import durable_write
from storage.ledger import last_step
from storage.retention import drop_old_adapters
from storage.runs import RunPaths
from tasks.artifacts import write_report_page
from tasks.improve_policy import label_visits, visit_groups
from tasks.open_objects import OpenRun
from tasks.rollout_queue import StepRollouts
from tasks.step_figures import StepClock
from tasks.train_policy import check_mismatch, has_fresh_rows, quoted, roll_out_groups, train_step

_LABELLED_AT_ONCE = 4
"""Shards of visits labelled at a time: while one's playouts finish, those of the others keep the cores busy."""


def with_steps(settings: RunSettings) -> RunSettings:
    return settings.model_copy(update={"steps": max(settings.steps, last_step(settings.paths))})


@flow(name="improve-policy", flow_run_name=named_after("improve", "run"), **PINNED)
async def improve_policy(run: str, runs_root: Path = Path("runs"), improve: ImproveSettings | None = None) -> dict[str, Any]:
    """Improve the newest version of `run` in rounds, and return the figures of all rounds.

    Args:
        run: Name of the run, its folder under `runs_root`. It has its settings, model and state cache from `entente train`.
        runs_root: Folder of all runs.
        improve: Rounds, positions and teacher.

    Raises:
        InputError: no such run, it is being trained, or it cannot learn from this teacher.
        DataError: the teacher gave an answer that is not legal; nothing was trained on.
    """
    check_parameters(runs_root, runs=[run])
    improve, paths = improve or ImproveSettings(), RunPaths(runs_root / run)
    stored = settings_of(paths).model_copy(update={"runs_root": runs_root})
    check_improve(improve, stored.prompts.thinking_tokens)
    if left := open_rounds(paths, improve):
        settings = with_steps(stored)
        async with open_run(settings, resume=True, trains_alone=True) as resources:
            published, point = resources.resume_point.published, dict[str, float]()
            async with ProcessPool(usable_cores()) as teachers:
                with open_log(resources, settings) as log, freeze_old_objects():
                    if published != BASE:
                        await resources.serve(published)  # the engines start with the base model
                    for number in left:
                        published = await _improve_once(resources, settings, improve, teachers, log, point, number, published)
                    if point:
                        log.log(published.version + 1, point)
            done = with_steps(stored)
            durable_write(paths.settings, done.model_dump_json(indent=1).encode())
        if settings.telemetry.report:
            await write_report_page(paths)
        await asyncio.to_thread(log.finish, paths.root / "report.html")
    return {"run": run, "rounds": results(paths, improve)}


async def _improve_once(
    resources: OpenRun,
    settings: RunSettings,
    improve: ImproveSettings,
    teachers: ProcessPool,
    log: MetricLog,
    point: dict[str, float],
    number: int,
    student: PolicyVersion,
) -> PolicyVersion:
    """One round, which reuses an earlier attempt's work; returns the newest version. `point` is the previous round's score,
    which the first step logs; then this round's."""
    began = time.monotonic()
    await asyncio.to_thread(begin_round, resources.paths, number, improve, student)
    distil_targets = await asyncio.to_thread(distil_targets_in_use, resources.paths, round_name(number))
    if not distil_targets:
        await asyncio.to_thread(check_student, resources.paths, number, student)
        distil_targets = await _label_all(resources, improve, teachers, number)
    labelled = time.monotonic()
    reporter().say(f"round {number}: {distil_targets} distillation targets for {student}")
    if await has_fresh_rows(resources):
        await check_mismatch(quoted(resources), begins=True)
    newest, metrics = await _learn(resources, improve, log, point, number, student)
    learned = time.monotonic()
    point |= await score_version(resources, settings, newest.version)
    low_high = (point["score/eval_low"], point["score/eval_high"]) if "score/eval_low" in point else None
    gain = f"{point['score/eval']:+.2f} {format_interval(low_high, '+.2f')} centres"
    reporter().say(f"round {number}: version {newest.version} gains {gain} against {settings.evaluation.opponents[0]}")
    await asyncio.to_thread(drop_old_adapters, resources.paths, settings.retention)
    losses = {name: metrics[name] for name in ("train/distil_loss", "train/teacher_entropy") if name in metrics}
    figures = {
        "round": number,
        "distil_targets": distil_targets,
        "version": newest.version,
        "adapter_hash": newest.adapter_hash,
        **losses,
    }
    stages = {"label_s": labelled - began, "learn_s": learned - labelled, "score_s": time.monotonic() - learned}
    seconds = {name: round(value, 1) for name, value in stages.items()}
    await asyncio.to_thread(end_round, resources.paths, number, figures | point | seconds)
    return newest


async def _label_all(resources: OpenRun, improve: ImproveSettings, teachers: ProcessPool, number: int) -> int:
    first_group = taken = done = 0
    labelling: list[asyncio.Task[int]] = []
    at_once = asyncio.Semaphore(_LABELLED_AT_ONCE)

    async def label_one(first: int, count: int) -> int:
        nonlocal done
        async with at_once:
            distil_targets = await label_visits(quoted(resources), quoted(teachers), improve, number, first, count)
        done += count
        reporter().stage(f"label {number}", done, improve.positions)
        return distil_targets

    try:
        while taken < improve.positions:
            visited = await visit_groups(quoted(resources), number, first_group)
            if not visited:
                raise DataError(f"start groups {first_group} and later of round {number} hold no decision of the policy")
            count = min(visited, improve.positions - taken)
            labelling.append(asyncio.create_task(label_one(first_group, count)))
            taken, first_group = taken + count, first_group + VISITED_GROUPS
            for each in labelling:
                if each.done():
                    each.result()  # an error of the teacher stops the round
        return sum(await asyncio.gather(*labelling))
    finally:
        for each in labelling:
            each.cancel()
        await asyncio.gather(*labelling, return_exceptions=True)


async def _learn(
    resources: OpenRun,
    improve: ImproveSettings,
    log: MetricLog,
    point: dict[str, float],
    number: int,
    student: PolicyVersion,
) -> tuple[PolicyVersion, dict[str, float]]:
    query = DistilQuery(round=round_name(number), count=improve.distil_targets_per_step, max_uses=improve.uses)
    resumed, newest, steps = resources.resume_point, student, improve.steps
    clock = StepClock(resources, await resources.host.run(resources.engine.stats()))
    metrics = resumed.metrics if resumed.published == student else {}
    # A step whose ledger survived a kill is replayed on its own rows, even if its targets were the last.
    while (repeats := last_step(resources.paths) > newest.version) or await asyncio.to_thread(
        resources.trainer.distil_targets_left, query
    ):
        step, groups = newest.version + 1, resources.rollouts.start_groups if improve.rollouts else 0
        reports: tuple[Figures, ...] = ()
        if groups and not repeats:
            group_range = GroupRange(step=step, first_group=(step - 1) * groups, count=groups)
            reports = (await roll_out_groups(quoted(resources), group_range),)
            await has_fresh_rows(resources)  # lists the folders: steps on targets alone leave gaps in the numbers
        rolled = StepRollouts(reports=reports, ready_share=float(not reports), queue={})
        metrics = await train_step(quoted(resources), step, groups, query)
        newest = await resources.saved()
        await resources.serve(newest)
        log.log(step, await clock.end_step(rolled, metrics) | point)
        point.clear()
        reporter().stage(f"learn {number}", min(steps, newest.version - student.version), steps)
    return newest, metrics
