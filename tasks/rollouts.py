"""The tasks that play: start groups of a step, the probe that compares engine and trainer, and a round's visits and their labels.

Beside them is what a flow does so that Prefect does not look into, or remember, what it need not.
"""

from typing import Any, TypeVar, cast

from prefect import Task, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import FlowRunContext
from prefect.utilities.annotations import quote

from entente.rollouts.figures import Figures
from entente.rollouts.groups import Stretch, play_probe, play_stretch
from entente.rollouts.improve_rounds import ImproveSettings
from entente.rollouts.teach import label, visit
from entente.settings.run_settings import ROLLOUT_TIMEOUT_S
from entente.telemetry.errors import DataError, InputError
from entente.telemetry.process_pool import ProcessPool
from tasks.dask_rollouts import DaskCluster
from tasks.resources import Resources

T = TypeVar("T")

ROLLOUT_RETRIES = 2
"""Retries of a rollout task. A second success is harmless, because its shard's name is taken."""


@task(
    name="rollout",
    task_run_name="rollout-s{stretch.step}-g{stretch.first_group}",
    persist_result=False,
    retries=ROLLOUT_RETRIES,
    retry_delay_seconds=1,
    retry_jitter_factor=1,
)
async def roll_out_on_dask(resources: Resources, cluster: DaskCluster, stretch: Stretch) -> Figures:
    """Have a worker of a Dask cluster play start groups and publish their shard. The time limit is the worker's: a stretch may
    wait for one."""
    with resources.spans.span("rollout"):
        return await cluster.play(stretch)


@task(
    name="rollout",
    task_run_name="rollout-s{stretch.step}-g{stretch.first_group}",
    persist_result=False,
    timeout_seconds=ROLLOUT_TIMEOUT_S,
    retries=ROLLOUT_RETRIES,
    retry_delay_seconds=1,
    retry_jitter_factor=1,
)
async def roll_out_groups(resources: Resources, stretch: Stretch) -> Figures:
    """Play start groups and publish their shard, in this process; see `play_stretch`."""
    return await play_stretch(resources, stretch)


@task(
    name="rollout-probe",
    task_run_name="rollout-probe-v{version}",
    persist_result=False,
    retries=0,
)
async def roll_out_probe(resources: Resources, version: int) -> None:
    """Play the probe of a resumed run; see `play_probe`."""
    await play_probe(resources, version)


def may_pass(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether a second attempt may succeed. A teacher that answers illegally answers the same again."""
    return not isinstance(state.data, DataError | InputError)


@task(
    name="visit",
    task_run_name="visit-r{number}-g{first_group}",
    persist_result=False,
    timeout_seconds=ROLLOUT_TIMEOUT_S,
    retries=ROLLOUT_RETRIES,
    retry_delay_seconds=1,
)
async def visit_groups(resources: Resources, number: int, first_group: int) -> int:
    """Play start groups of a round and publish their shard; see `visit`."""
    with resources.spans.span("rollout"):
        return await visit(resources, number, first_group)


@task(
    name="label",
    task_run_name="label-r{number}-g{first_group}",
    persist_result=False,
    retries=ROLLOUT_RETRIES,
    retry_delay_seconds=1,
    retry_condition_fn=may_pass,
)
async def label_visits(
    resources: Resources, teachers: ProcessPool, improve: ImproveSettings, number: int, first_group: int, count: int
) -> int:
    """Label decisions of a shard of visits and publish their lessons; see `label`."""
    return await label(resources, teachers, improve, number, first_group, count)


def quoted(value: T) -> T:
    """Wrap `value` as an argument of a task. The task receives `value` itself.

    Without this, Prefect visits every field of every dataclass in the argument, twice a task. A run's resources hold thousands of
    positions; visiting them took 50 ms a task.
    """
    return cast(T, quote(value))


def forget_finished_tasks() -> None:
    """Drop Prefect's record of the states of finished tasks in this flow run; does nothing outside of one.

    Prefect keeps the state of each task as long as the flow runs, under the ids of what the task returned, to draw an arrow when
    another task is given that. No task of ours is given another's result, and a run has thousands of tasks.
    """
    context = FlowRunContext.get()
    if context is not None:
        context.run_results.clear()
