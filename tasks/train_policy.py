"""The tasks of the training loop: roll out, compare trainer and engine, train a step.

Before its first step a run refuses to train unless trainer and engine compute the same probabilities for rows of the version
that both have loaded. Later a mismatch raises an alert. Without a buffer every later step measures the mismatch on its own rows;
with one, every `COMPARE_EVERY`-th.
"""

import asyncio
from typing import TypeVar, cast

from prefect import task
from prefect.context import FlowRunContext
from prefect.utilities.annotations import quote

from entente.rollouts.figures import Figures
from entente.rollouts.groups import GroupRange, play_groups, play_probe
from entente.settings.run_settings import ROLLOUT_TIMEOUT_S, RunSettings
from tasks.dask_rollouts import DaskCluster
from tasks.open_objects import OpenRun
from tasks.rollout_queue import RolloutQueue

T = TypeVar("T")

ROLLOUT_RETRIES = 2
"""Retries of a rollout task. Repeating a task that succeeded is harmless, because its shard exists."""
COMPARE_EVERY = 20
"""Steps between comparisons, which may wait for a probe, with a buffer of one step also for rollouts in flight."""


@task(
    name="rollout",
    task_run_name="rollout-s{group_range.step}-g{group_range.first_group}",
    persist_result=False,
    retries=ROLLOUT_RETRIES,
    retry_delay_seconds=1,
    retry_jitter_factor=1,
)
async def roll_out_on_dask(resources: OpenRun, cluster: DaskCluster, group_range: GroupRange) -> Figures:
    """Play start groups on a Dask worker, which publishes their shard. The worker enforces the time limit, because a task may
    wait for a free worker."""
    with resources.spans.span("rollout"):
        return await cluster.play(group_range)


@task(
    name="rollout",
    task_run_name="rollout-s{group_range.step}-g{group_range.first_group}",
    persist_result=False,
    timeout_seconds=ROLLOUT_TIMEOUT_S,
    retries=ROLLOUT_RETRIES,
    retry_delay_seconds=1,
    retry_jitter_factor=1,
)
async def roll_out_groups(resources: OpenRun, group_range: GroupRange) -> Figures:
    return await play_groups(resources, group_range)


@task(
    name="rollout-probe",
    task_run_name="rollout-probe-v{version}",
    persist_result=False,
    retries=ROLLOUT_RETRIES,
    retry_delay_seconds=1,
    retry_jitter_factor=1,
)
async def roll_out_probe(resources: OpenRun, version: int) -> None:
    await play_probe(resources, version)


async def check_agreement(resources: OpenRun, queue: RolloutQueue, settings: RunSettings, step: int) -> dict[str, float]:
    """Compare trainer and engine before `step` if due; returns the mismatch as metrics, or none. Raises TrainingError if the
    run begins and the mismatch is above the limit."""
    begins = step == resources.resume_point.step_done + 1
    if not begins and not (settings.pipeline.buffer_depth and step % COMPARE_EVERY == 0):
        return {}
    # Rollouts ran ahead if no published row is from the trainer's version.
    if not await has_fresh_rows(resources) and (begins or queue.in_step):
        await queue.all_played()  # else the probe is played beside those in flight
    if not await has_fresh_rows(resources):
        await queue.served()
        await roll_out_probe(quoted(resources), step - 1)
    return await check_mismatch(quoted(resources), begins)


async def has_fresh_rows(resources: OpenRun) -> bool:
    """True if there is a row of the version that the trainer has loaded."""
    return await asyncio.to_thread(resources.trainer.fresh_rows) > 0


@task(name="check-mismatch", persist_result=False, retries=0)
async def check_mismatch(resources: OpenRun, begins: bool) -> dict[str, float]:
    """Compare the log-probabilities of trainer and engine on fresh rows. Returns the mismatch as metrics.

    Raises:
        TrainingError: the run `begins`, and they differ by more than the limit.
    """
    with resources.spans.span("compare"):
        return await asyncio.to_thread(resources.trainer.measure_mismatch, begins)


@task(
    name="train-step",
    task_run_name="train-step-{step}",
    persist_result=False,
    retries=0,
)
async def train_step(resources: OpenRun, step: int) -> dict[str, float]:
    """Train `step` in the trainer's process, which then publishes policy version `step` while later steps may train. Returns
    metrics."""
    with resources.spans.span("train"):
        # In a thread, because rollouts run on this event loop.
        return await asyncio.to_thread(resources.trainer.step, step, resources.rollouts.start_groups)


def quoted(value: T) -> T:
    """Wrap `value` as an argument of a task, which receives `value` itself. Otherwise Prefect visits every field of every
    dataclass in it, twice per task: 50 ms for the thousands of positions in a run's resources."""
    return cast(T, quote(value))


def forget_finished_tasks() -> None:
    """Drop Prefect's records of finished tasks in this flow run, if any. Prefect keeps each task's state to link tasks that
    take its result; ours take none, and a run has thousands of tasks."""
    context = FlowRunContext.get()
    if context is not None:
        context.run_results.clear()
