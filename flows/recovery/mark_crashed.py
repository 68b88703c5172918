"""Flow and task runs that a kill left as running in Prefect's pages: set to Crashed, so that no page shows work that nobody does.

Only a view is mended here: what was done is in files, and nothing reads it from a state.
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

from pipeline.work_record import works_at
from storage.runs import RunPaths
from telemetry.progress import reporter

UNSETTLED = [StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED, StateType.CANCELLING]
_WITHIN_S = 60.0


async def mark_children_crashed(client: PrefectClient, flow_run: UUID, because: str) -> int:
    """Set to Crashed what runs below that flow run as far as Prefect knows; how many those were."""
    settled = 0
    below = FlowRunFilter(
        parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNSETTLED)),
    )
    for run in await client.read_flow_runs(flow_run_filter=below):
        await client.set_flow_run_state(run.id, Crashed(message=because), force=True)
        settled += 1 + await mark_children_crashed(client, run.id, because)
    tasks = TaskRunFilter(
        flow_run_id=TaskRunFilterFlowRunId(any_=[flow_run]),
        state=TaskRunFilterState(name=None, type=TaskRunFilterStateType(any_=UNSETTLED)),
    )
    while found := await client.read_task_runs(task_run_filter=tasks, limit=100):
        for task in found:
            await client.set_task_run_state(task.id, Crashed(message=because), force=True)
        settled += len(found)
    return settled


async def mark_flow_runs_crashed(client: PrefectClient, flow_runs: Sequence[UUID], because: str) -> int:
    """Set to Crashed those of the flow runs that count as running, and what runs below any of them; how many those were."""
    if not flow_runs:
        return 0
    settled, ids = 0, FlowRunFilterId(any_=list(flow_runs))
    running = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING]))
    for run in await client.read_flow_runs(flow_run_filter=FlowRunFilter(id=ids, state=running)):
        await client.set_flow_run_state(run.id, Crashed(message=because), force=True)
        settled += 1
    for flow_run in flow_runs:
        settled += await mark_children_crashed(client, flow_run, because)
    return settled


async def mark_earlier_crashed(paths: RunPaths) -> None:
    """Settle what earlier flow runs of this run left; whoever calls this holds the run's lock, so they are all over.

    A server that does not answer costs a sentence.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    mine = str(context.flow_run.id)
    earlier = [UUID(work.flow_run) for work in works_at(paths) if work.flow_run != mine]
    try:
        async with asyncio.timeout(_WITHIN_S), get_client() as client:
            await mark_flow_runs_crashed(client, earlier, "its process ended, and another goes on with the run")
    except Exception as error:  # whatever it is, a page is no reason to end a run
        reporter().say(f"what ended processes left in Prefect's pages stays there ({type(error).__name__}); the run goes on")
