"""What tasks share is handed on as it is."""

from typing import TypeVar, cast

from prefect.utilities.annotations import quote

T = TypeVar("T")


def quoted(value: T) -> T:
    """`value` as an argument of a task. The task receives `value` itself.

    Without this, Prefect visits every field of every dataclass in the argument, twice a task. For a run's resources, which hold
    thousands of positions, that took 50 ms a task.
    """
    return cast(T, quote(value))
