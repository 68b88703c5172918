"""What a flow does so that Prefect does not look into, or remember, what it need not."""

from typing import TypeVar, cast

from prefect.context import FlowRunContext
from prefect.utilities.annotations import quote

T = TypeVar("T")


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
