"""What would make every task of every step dear stays out of it: a walk through what tasks share, a question to the server."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.context import FlowRunContext
from prefect.states import Completed
from prefect.utilities.collections import visit_collection
from prefect.utilities.engine import collect_task_run_inputs_sync, link_state_to_task_run_result, resolve_to_final_result

from tasks.train_policy import (
    check_mismatch,
    forget_finished_tasks,
    quoted,
    roll_out_groups,
    roll_out_on_dask,
    roll_out_probe,
    train_step,
)


@dataclass
class Visited:
    """A dataclass that tells when Prefect looks at its fields."""

    fields_read: list[str]

    def __getattribute__(self, name: str) -> Any:
        if name == "inside":
            object.__getattribute__(self, "fields_read").append(name)
        return object.__getattribute__(self, name)

    inside: int = 0


def test_prefect_hands_a_quoted_argument_on_without_reading_its_fields():
    read: list[str] = []

    collect_task_run_inputs_sync(Visited(read))
    assert read, "Prefect reads the fields of what is not quoted: else this test says nothing"
    read.clear()
    value = Visited(read)
    inputs = collect_task_run_inputs_sync(quoted(value))
    assert (inputs, read) == (set(), [])
    options: Any = {"visit_fn": resolve_to_final_result, "return_data": True, "remove_annotations": True, "context": {}}
    assert visit_collection(quoted(value), **options) is value and read == []


@pytest.mark.parametrize(
    "task",
    [roll_out_groups, roll_out_probe, roll_out_on_dask, check_mismatch, train_step],
    ids=lambda task: task.name,
)
def test_a_task_of_a_step_has_no_tag_for_which_prefect_would_ask_the_server(task: Any):
    assert not task.tags


def test_what_prefect_remembers_of_finished_tasks_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    context = SimpleNamespace(run_results={})
    monkeypatch.setattr(FlowRunContext, "get", lambda: context)
    link_state_to_task_run_result(Completed(), Visited([]))
    assert context.run_results, "Prefect remembers a task under what it returned: else this test says nothing"
    forget_finished_tasks()
    assert not context.run_results
    monkeypatch.setattr(FlowRunContext, "get", lambda: None)
    forget_finished_tasks()
