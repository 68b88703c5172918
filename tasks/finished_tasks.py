"""Frees what Prefect remembers of a flow's finished tasks."""

from prefect.context import FlowRunContext


def forget_finished_tasks() -> None:
    """Drop Prefect's record of the states of finished tasks in this flow run; does nothing outside of one.

    Prefect keeps the state of each task as long as the flow runs, under the ids of what the task returned, to draw an arrow when
    another task is given that. No task of ours is given another's result, and a run has thousands of tasks.
    """
    context = FlowRunContext.get()
    if context is not None:
        context.run_results.clear()
