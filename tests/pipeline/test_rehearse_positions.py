"""A rehearsal draws what a step drew, and what another query would have drawn, from the same past."""

from pathlib import Path
from typing import Any

import pytest

from pipeline import rehearse_positions as rehearsal
from pipeline.rehearse_positions import rehearse_positions
from pipeline.resources import PRODUCER
from pipeline.run_settings import RunSettings
from state_cache.sampling import learnable_weights, sample_start_positions
from state_cache.settings import CacheSettings
from state_cache.store import StateCache
from storage.closed_query import ask_closed
from storage.learnable import PastGroups
from storage.runs import RunPaths
from telemetry.errors import InputError

GROUPS, LAG, SEED = 4, 1, 3


class Past:
    """Start groups of one position: as many as came before the one that is asked about, with that spread."""

    def __init__(self, snapshot_id: str) -> None:
        self._snapshot_id = snapshot_id

    def before(self, producer: str, start_group: int) -> dict[str, PastGroups]:
        assert producer == PRODUCER
        return {self._snapshot_id: PastGroups(start_group, float(start_group), 0.0)} if start_group else {}

    def ask_closed(self, query: str, **of_query: Any) -> list[tuple[Any, ...]]:
        return ask_closed(query, **of_query)


@pytest.fixture
def rehearse(tmp_path: Path, positions, monkeypatch: pytest.MonkeyPatch) -> Any:
    cache = StateCache(path=tmp_path, settings=CacheSettings(), train=tuple(positions), held_out=())
    monkeypatch.setattr(rehearsal, "find_shared_cache", lambda root, settings: tmp_path)
    monkeypatch.setattr(rehearsal, "open_cache", lambda folder, settings: cache)
    given = {"seed": SEED, "storage": {"max_policy_lag": LAG}}
    settings = RunSettings.model_validate({**given, "rollouts": {"sampling": "learnable", "start_groups": GROUPS}})

    def rehearse(query: str, steps: range = range(1, 7)) -> list[rehearsal.RehearsedDraw]:
        return rehearse_positions(RunPaths(tmp_path), query, steps, lambda step: settings, Past(positions[0].snapshot_id))

    return rehearse


def test_the_run_s_own_sampling_draws_what_the_step_drew(rehearse, positions) -> None:
    for step in rehearse("learnable"):
        before = max(0, step.step - 1 - LAG) * GROUPS
        weights = learnable_weights(positions, {positions[0].snapshot_id: float(before)} if before else {})
        drawn = sample_start_positions(positions, GROUPS, SEED, step.step, sampling="learnable", weights=weights)
        assert step.in_fact == step.by_query and step.both == step.in_fact.positions == len({s.snapshot_id for s, _ in drawn})
        assert step.in_fact.year == sum(snapshot.year for snapshot, _ in drawn) / GROUPS
        assert step.possible == len(positions), "also while nothing is known, and all weights are equal"
        met = any(snapshot.snapshot_id == positions[0].snapshot_id for snapshot, _ in drawn)
        assert step.in_fact.spread == (float(before) if met and before else None)


def test_a_query_draws_by_its_own_weights_with_what_was_known_then(rehearse, positions) -> None:
    found = rehearse("FROM positions SELECT snapshot_id, 1 AS weight WHERE start_groups = 0")
    assert [step.possible for step in found] == [len(positions)] * 2 + [len(positions) - 1] * 4
    only = rehearse(f"FROM positions SELECT snapshot_id, 1 AS weight WHERE snapshot_id = '{positions[0].snapshot_id}'")[-1]
    assert (only.possible, only.by_query.positions, only.by_query.start_groups, only.by_query.spread) == (1, 1, 4, 16.0)
    assert only.both == (1 if only.in_fact.spread is not None else 0)


def test_a_cache_that_is_gone_is_said_in_a_sentence(rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "find_shared_cache", lambda root, settings: None)
    with pytest.raises(InputError, match=r"state cache of run '.*' is gone"):
        rehearse("uniform")
