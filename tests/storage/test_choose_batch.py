"""A step that finds too few rows waits as long as it may, then reaches back as far as it may, then takes fewer, and says so."""

import random
from typing import Any

import pytest

from storage.choose_batch import Choice, choose_batch
from storage.index import Index
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.shards import publish_shard


def publish(paths: RunPaths, rows: Any, number: int, version: int) -> None:
    decisions = [
        rows.make_decision(random.Random(fork), start_group=number, fork=fork, policy_version=version, centres_gained=float(fork))
        for fork in range(3)
    ]
    publish_shard(paths, "p0", number, decisions, [], {})


def choose(paths: RunPaths, sleep: Any = None, **settings: Any) -> Choice:
    """For a trainer that holds version 6 and wants three start groups."""
    forbidden = sleep or (lambda seconds: pytest.fail("it waited"))
    return choose_batch(
        Index(paths),
        StorageSettings(**settings),
        step=7,
        policy_version=6,
        start_groups=3,
        seed=0,
        sleep=forbidden,
    )


def groups(choice: Choice) -> set[int]:
    return set(choice.selection.rows["start_group"].to_pylist())


def test_where_there_is_enough_it_takes_it_at_once(paths: RunPaths, rows: Any) -> None:
    for number in range(4):
        publish(paths, rows, number, version=6)
    choice = choose(paths, shortage_wait_s=60, hard_policy_lag=9)
    assert len(groups(choice)) == 3 and (choice.shortage, choice.patient, choice.waited_s) == ("", False, pytest.approx(0, abs=9))


def test_it_trains_on_fewer_and_says_so(paths: RunPaths, rows: Any) -> None:
    publish(paths, rows, 0, version=6)
    publish(paths, rows, 1, version=3)
    choice = choose(paths)
    assert groups(choice) == {0} and not choice.patient
    assert choice.shortage == "step 7 found too few fresh rows: trains on 1 of 3 start groups"


def test_it_reaches_back_no_further_than_it_must_and_may(paths: RunPaths, rows: Any) -> None:
    for number, version in enumerate([6, 3, 2, 1]):
        publish(paths, rows, number, version)
    choice = choose(paths, hard_policy_lag=9)
    assert groups(choice) == {0, 1, 2} and choice.patient and choice.selection.query.max_policy_lag == 4
    assert choice.shortage == "step 7 found too few fresh rows: took rows of lag up to 4"
    choice = choose(paths, hard_policy_lag=3)
    assert groups(choice) == {0, 1}
    assert choice.shortage == "step 7 found too few fresh rows: took rows of lag up to 3, then trains on 2 of 3 start groups"


def test_it_waits_for_rows_that_come_and_goes_on_as_soon_as_they_are_there(paths: RunPaths, rows: Any) -> None:
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        publish(paths, rows, len(looks), version=6)

    publish(paths, rows, 0, version=6)
    choice = choose(paths, sleep, shortage_wait_s=60, hard_policy_lag=9)
    assert groups(choice) == {0, 1, 2} and len(looks) == 2
    assert choice.selection.query.max_policy_lag == 2


def test_it_waits_no_longer_than_it_may(paths: RunPaths, rows: Any) -> None:
    import time

    publish(paths, rows, 0, version=6)
    choice = choose(paths, time.sleep, shortage_wait_s=0.6)
    assert 0.6 <= choice.waited_s < 5 and choice.patient
    assert choice.shortage.endswith(" s, then trains on 1 of 3 start groups") and "waited 0." in choice.shortage
