"""What was played is published once, whole and in order; together while nobody needs it, at once where a step waits."""

import random
from typing import Any

import pytest

from pipeline.gathering import SHARD_GROUPS, SHARD_ROWS, Gathered, PlayedGroups, is_due


def played(first: int, count: int = 4, version: int = 3, rows: int = 10) -> PlayedGroups:
    """Rows are numbers, as nothing reads them."""
    numbers: Any = [(first, row) for row in range(rows)]
    return PlayedGroups(first=first, count=count, version=version, decisions=numbers, plies=numbers)


def test_start_groups_wait_while_there_are_some_to_spare_and_until_the_shard_is_full():
    assert not is_due(played(0), newest=3, gather=True)
    assert is_due(played(0), newest=3, gather=False), "a step waits"
    assert is_due(played(0), newest=4, gather=True), "they grow old"
    assert is_due(played(0, rows=SHARD_ROWS), newest=3, gather=True)
    assert is_due(played(0, count=SHARD_GROUPS, rows=1), newest=3, gather=True)


def test_neighbours_of_one_version_become_one_shard_in_whatever_order_they_ended():
    gathered = Gathered()
    for first in (8, 0, 4):
        gathered.add(played(first))
    (shard,) = gathered.due(newest=3, gather=False)
    assert (shard.first, shard.count) == (0, 12) and [first for first, _ in shard.decisions] == [0] * 10 + [4] * 10 + [8] * 10  # type: ignore[misc]
    gathered.remove(shard)
    assert gathered.start_groups == 0 and gathered.due(newest=9, gather=False) == []


def test_a_gap_or_another_version_parts_two_shards():
    gathered = Gathered()
    for each in (played(0), played(8), played(12, version=4)):
        gathered.add(each)
    assert [(each.first, each.count) for each in gathered.due(newest=4, gather=False)] == [(0, 4), (8, 4), (12, 4)]
    assert [each.first for each in gathered.due(newest=4, gather=True)] == [0, 8], "those of version 3 alone"


@pytest.mark.parametrize("seed", range(10))
def test_whatever_is_asked_when_each_start_group_is_published_once_and_shards_are_large_where_nobody_waits(seed: int):
    dice = random.Random(seed)
    gathered, version, shards = Gathered(), 0, list[PlayedGroups]()
    begun = [(4 * number, number // 20) for number in range(100)]
    dice.shuffle(begun)
    for first, began_with in sorted(begun, key=lambda each: each[1]):
        version = max(version, began_with)
        gathered.add(played(first, version=began_with, rows=dice.randint(20, 90)))
        for due in gathered.due(newest=version, gather=dice.random() < 0.8):
            gathered.remove(due)
            shards.append(due)
    shards += gathered.due(newest=version + 1, gather=True)
    covered = [number for each in shards for number in range(each.first, each.first + each.count)]
    assert sorted(covered) == list(range(400))
    assert all({first for first, _ in each.decisions} == set(range(each.first, each.first + each.count, 4)) for each in shards)  # type: ignore[misc]
    assert all(len(each.decisions) < 2 * SHARD_ROWS for each in shards)
