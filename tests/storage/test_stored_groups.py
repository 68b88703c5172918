"""Start groups of a run are handed out whole, and as the base drew them; under new numbers only their identity is another."""

import random
from dataclasses import replace

import numpy as np
import pytest

from records.policy_version import PolicyVersion
from records.rows import decision_id
from storage.runs import RunPaths
from storage.schema import DECISION_SCHEMA
from storage.shards import publish_shard, shard_path
from storage.stored_groups import StoredGroup, stored_groups
from telemetry.errors import InputError
from tests.damage import flip
from tests.storage.make_rows import make_decision, make_ply

MODEL = {"base_model": "m1", "tokenizer": "t1"}
IDENTITY = {"decision_id", "start_group", "policy_version", "adapter_hash", "worker", "checksum"}
ENGINE = {"queue_ms", "prefill_ms", "decode_ms", "cached_tokens"}


def publish(paths: RunPaths, first: int, *, producer: str = "local", count: int = 1, **given: object) -> None:
    """A shard of some start groups, two forks each; `given` goes into the last group's second fork."""
    rng, numbers = random.Random(first), range(first, first + count)
    places = [(number, fork) for number in numbers for fork in (0, 1)]
    rows = [
        make_decision(rng, producer, start_group=number, fork=fork, **(given if (number, fork) == places[-1] else {}))
        for number, fork in places
    ]
    plies = [make_ply(start_group=number, fork=fork) for number, fork in places]
    publish_shard(paths, producer, first, rows, plies, MODEL)


def numbers(groups: list[StoredGroup]) -> list[int]:
    return [group.decisions[0].start_group for group in groups]


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    return RunPaths(tmp_path / "run").create()


def test_groups_come_whole_in_order_and_no_more_than_asked_for(paths: RunPaths):
    publish(paths, 2, count=2)
    publish(paths, 0, count=2)
    assert numbers(stored_groups(paths, MODEL)) == [0, 1, 2, 3]
    assert numbers(stored_groups(paths, MODEL, most=3)) == [0, 1, 2]
    assert all(
        [row.fork for row in group.decisions] == [0, 1] == [ply.fork for ply in group.plies]
        for group in stored_groups(paths, MODEL)
    )


@pytest.mark.parametrize(
    "unfit", [{"policy_version": 1}, {"status": "failed", "reason": "lost"}, {"orders_rejected": 1}], ids=str
)
def test_a_group_with_a_row_that_is_not_the_base_s_own_is_left_out_as_a_whole(paths: RunPaths, unfit: dict):
    publish(paths, 0, count=2, **unfit)
    assert numbers(stored_groups(paths, MODEL)) == [0]


def test_under_a_new_number_only_identity_and_the_engine_s_time_are_others(paths: RunPaths):
    publish(paths, 0)
    (group,) = stored_groups(paths, MODEL)
    rows, plies = group.renumbered("other", 77, policy=PolicyVersion(version=5, adapter_hash="h5"), worker="simulated")
    for before, after in zip(group.decisions, rows, strict=True):
        for name in set(DECISION_SCHEMA.names) - IDENTITY - ENGINE:
            assert np.array_equal(getattr(before, name), getattr(after, name)), name
        assert all(getattr(after, name) == 0 for name in ENGINE)
        assert (after.start_group, after.policy_version, after.adapter_hash, after.worker) == (77, 5, "h5", "simulated")
        assert after.decision_id == decision_id("other", 77, after.fork, after.ply, after.power)
    assert plies == [replace(ply, start_group=77) for ply in group.plies]


def test_a_damaged_shard_is_passed_over_and_named_where_nothing_else_is_there(paths: RunPaths):
    publish(paths, 0)
    publish(paths, 1)
    damaged = shard_path(paths, "local", 0)
    flip(damaged)
    assert numbers(stored_groups(paths, MODEL)) == [1]
    shard_path(paths, "local", 1).unlink()
    with pytest.raises(InputError, match=r"no whole start group that its base drew \(.*000000\.arrow"):
        stored_groups(paths, MODEL)


def test_another_model_and_a_run_without_rollouts_are_refused(paths: RunPaths):
    with pytest.raises(InputError, match="has no whole start group that its base drew: name a run that played at least one step"):
        stored_groups(paths, MODEL)
    publish(paths, 0)
    with pytest.raises(InputError, match="were made with tokenizer t1, this run has t2; name a run of the same model"):
        stored_groups(paths, MODEL | {"tokenizer": "t2"})
