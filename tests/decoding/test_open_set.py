"""Open sets: every id but one, as two numbers."""

import numpy as np
import pytest

from decoding.open_set import excluded_ids, nth_id, open_set, open_sets, set_size


def test_an_open_set_is_told_from_a_list_and_names_the_id_that_it_leaves_out():
    sets = [np.array([4, 7]), open_set(0, 9), np.array([3]), open_set(8, 9)]
    ids, offsets = np.concatenate(sets), np.array([0, 2, 4, 5, 7])

    is_open = open_sets(ids, offsets)

    assert is_open.tolist() == [False, True, False, True]
    assert excluded_ids(ids[offsets[:-1]][is_open]).tolist() == [0, 8]
    assert ids[offsets[1:] - 1][is_open].tolist() == [9, 9]


@pytest.mark.parametrize("excluded", [-1, 9])
def test_an_open_set_excludes_one_of_its_own_ids(excluded: int):
    with pytest.raises(ValueError, match="excludes one of its 9 ids"):
        open_set(excluded, 9)


@pytest.mark.parametrize("excluded", [0, 3, 8])
def test_the_ids_of_a_set_can_be_counted_off_listed_or_open(excluded: int):
    listed = np.array([token for token in range(9) if token != excluded])
    for legal in (listed, open_set(excluded, 9)):
        assert [nth_id(legal, number) for number in range(set_size(legal))] == listed.tolist()
