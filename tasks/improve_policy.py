"""The tasks of a round of improvement: visit positions, and label them by a teacher."""

from typing import Any

from prefect import Task, task
from prefect.client.schemas.objects import State, TaskRun

from entente.rollouts.improve_rounds import ImproveSettings
from entente.rollouts.teach import label, visit
from entente.settings.run_settings import ROLLOUT_TIMEOUT_S
from entente.telemetry.errors import DataError, InputError
from entente.telemetry.process_pool import ProcessPool
from tasks.open_objects import OpenRun
from tasks.train_policy import ROLLOUT_RETRIES


def may_pass(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """True if a retry may succeed. A teacher with an illegal answer would repeat it."""
    return not isinstance(state.data, DataError | InputError)


@task(
    name="visit",
    task_run_name="visit-r{number}-g{first_group}",
    persist_result=False,
    timeout_seconds=ROLLOUT_TIMEOUT_S,
    retries=ROLLOUT_RETRIES,
    retry_delay_seconds=1,
)
async def visit_groups(resources: OpenRun, number: int, first_group: int) -> int:
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
    resources: OpenRun, teachers: ProcessPool, improve: ImproveSettings, number: int, first_group: int, count: int
) -> int:
    return await label(resources, teachers, improve, number, first_group, count)
