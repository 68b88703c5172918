"""Which rows share an update: whole advantage groups, about equally many."""

import pytest

from tests.training.batches import batch_of
from training.update import share_rows

FORKS, GROUPS = 2, 24


def dealt(shares: int) -> list[list[int]]:
    """The advantage groups of each update."""
    rows = [([1, 2], [3, 4])] * (FORKS * GROUPS)
    batch = batch_of(rows, groups=[row // FORKS for row in range(FORKS * GROUPS)], widest=5)
    return [[int(batch.advantage_groups[row]) for row in share] for share in share_rows(batch, shares)]


def test_one_update_has_every_row_in_the_batch_s_order():
    assert dealt(1) == [sorted([*range(GROUPS)] * FORKS)]


@pytest.mark.parametrize("shares", [2, 5])
def test_updates_have_whole_groups_and_about_equally_many(shares: int):
    found = dealt(shares)
    assert sorted(group for share in found for group in share) == sorted([*range(GROUPS)] * FORKS)
    assert all(share.count(group) == FORKS for share in found for group in share)
    assert {len(set(share)) for share in found} <= {GROUPS // shares, GROUPS // shares + 1}


def test_without_rows_every_update_is_empty():
    assert share_rows(None, 3) == [[], [], []]
