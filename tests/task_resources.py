"""What tasks of a run work with, where a test needs only some of it."""

from pathlib import Path
from typing import Any

from entente.records.policy_version import BASE, TrainedStep
from entente.rollouts.settings import RolloutSettings
from state_cache.settings import CacheSettings
from state_cache.store import StateCache
from storage.runs import RunPaths
from tasks.open_objects import OpenRun


def resources_of(run: Path, positions: list[Any], rollouts: RolloutSettings, **given: Any) -> OpenRun:
    """OpenRun of a run in this folder that starts from these positions; what is not given is None."""
    nothing = dict.fromkeys(("host", "engine", "tokens", "trainer"))
    parts: dict[str, Any] = {
        "model": run.parent,
        "seed": 5,
        "cache": StateCache(path=run.parent, settings=CacheSettings(), train=tuple(positions), held_out=()),
        "resume_point": TrainedStep(published=BASE, metrics={}),
        "max_policy_lag": 2,
        "engine_threads": (1, 1),
        "provenance": {"run": run.name},
    }
    return OpenRun(paths=RunPaths(run).create(), rollouts=rollouts, **(nothing | parts | given))
