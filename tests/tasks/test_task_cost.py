"""What would make every task of every step dear stays out of it: a walk through what tasks share, a question to the server."""

from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.collections import visit_collection

from pipeline.resources import Resources
from state_cache.settings import CacheSettings
from state_cache.store import StateCache
from tasks.dask_rollouts import roll_out_elsewhere
from tasks.produced_rollouts import produce_groups
from tasks.replayed_rollouts import replay_groups
from tasks.rollouts import roll_out_groups, roll_out_probe
from tasks.training import check_mismatch, train_step


def test_prefect_does_not_look_into_what_tasks_share(positions):
    nothing: Any = None
    resources = Resources(
        paths=nothing,
        model=Path("model"),
        seed=0,
        rollouts=nothing,
        cache=StateCache(path=Path("cache"), settings=CacheSettings(), train=tuple(positions), held_out=()),
        host=nothing,
        engine=nothing,
        scorer=nothing,
        tokens=nothing,
        trainer=nothing,
        resume_point=nothing,
        provenance={},
        past_spreads=nothing,
        max_policy_lag=0,
    )
    seen: list[object] = []
    visit_collection(resources, seen.append)
    assert seen == [resources]


@pytest.mark.parametrize(
    "task",
    [roll_out_groups, roll_out_probe, roll_out_elsewhere, produce_groups, replay_groups, check_mismatch, train_step],
    ids=lambda task: task.name,
)
def test_a_task_of_a_step_has_no_tag_for_which_prefect_would_ask_the_server(task: Any):
    assert not task.tags
