"""What tasks share is handed through Prefect unopened: it would look at every position of the state cache, for every task."""

from pathlib import Path
from typing import Any

from prefect.utilities.collections import visit_collection

from state_cache.settings import CacheSettings
from state_cache.store import StateCache
from tasks.resources import Resources


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
        standing=nothing,
        provenance={},
        past_spreads=nothing,
        max_policy_lag=0,
    )
    seen: list[object] = []
    visit_collection(resources, seen.append)
    assert seen == [resources]
