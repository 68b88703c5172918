"""Sets flow and task runs to Crashed that Prefect still shows as running after their process was killed.

This only corrects what Prefect shows: the work done is recorded in files, and nothing reads it from a state.
"""

import asyncio
from collections.abc import Sequence
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterFlowRunId,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext
from prefect.states import Crashed

from pipeline.work_record import list_works
from storage.runs import RunPaths
from telemetry.progress import reporter

UNFINISHED = [StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED, StateType.CANCELLING]
_TIME_LIMIT_S = 60.0


async def mark_children_crashed(client: PrefectClient, flow_run: UUID, reason: str) -> int:
    """Set unfinished subflows and tasks of a flow run to Crashed. Returns how many there were."""
    marked = 0
    below = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNFINISHED)),
    )
    for run in await client.read_flow_runs(flow_run_filter=below):
        await client.set_flow_run_state(run.id, Crashed(message=reason), force=True)
        marked += 1 + await mark_children_crashed(client, run.id, reason)
    tasks = TaskRunFilter(
        flow_run_id=TaskRunFilterFlowRunId(any_=[flow_run]),
        state=TaskRunFilterState(name=None, type=TaskRunFilterStateType(any_=UNFINISHED)),
    )
    while found := await client.read_task_runs(task_run_filter=tasks, limit=100):
        for task in found:
            await client.set_task_run_state(task.id, Crashed(message=reason), force=True)
        marked += len(found)
    return marked


async def mark_flow_runs_crashed(client: PrefectClient, flow_runs: Sequence[UUID], reason: str) -> int:
    """Set the unfinished ones of `flow_runs`, and their subflows and tasks, to Crashed. Returns how many there were."""
    if not flow_runs:
        return 0
    marked, ids = 0, FlowRunFilterId(any_=list(flow_runs))
    running = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING]))
    for run in await client.read_flow_runs(flow_run_filter=FlowRunFilter(id=ids, state=running)):
        await client.set_flow_run_state(run.id, Crashed(message=reason), force=True)
        marked += 1
    for flow_run in flow_runs:
        marked += await mark_children_crashed(client, flow_run, reason)
    return marked


async def mark_earlier_crashed(paths: RunPaths) -> None:
    """Mark what earlier processes left unfinished of this run. The caller holds the run's lock, so they have all ended.

    Flow runs of this process are left: that of a sweep goes on. A failed request is reported and does not end the run.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    earlier = [UUID(work.flow_run) for work in list_works(paths) if not work.ours]
    try:
        async with asyncio.timeout(_TIME_LIMIT_S), get_client() as client:
            await mark_flow_runs_crashed(client, earlier, "its process ended, and another one continues the run")
    except Exception as error:  # a wrong state on a page must not end a run
        reporter().say(f"Prefect still shows runs of ended processes as running ({type(error).__name__}); the run continues")
