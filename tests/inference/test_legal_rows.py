"""The rows of a decode batch follow their tables through every repacking."""

import random

import numpy as np

from decoding.legal_table import END, LegalTable
from inference.legal_rows import LegalRows, TableMemo


def small_table(salt: int) -> LegalTable:
    """Two tokens, then one of three or an end: ids differ by `salt`."""
    return LegalTable(
        offsets=np.array([0, 2, 4], np.int32),
        token_ids=np.array([salt, salt + 1, salt + 5, salt + 6], np.int32),
        next_nodes=np.array([1, END, END, END], np.int32),
        longest=2,
    )


def test_rows_follow_their_requests_through_adds_moves_swaps_and_removals():
    """Against an oracle that keeps requests in a dictionary by name and replays them from their first token."""
    dice = random.Random(0)
    rows, outputs, tables, at = LegalRows(), {}, {}, {}
    for name in range(400):
        free = [index for index in range(8) if index not in at]
        if free and dice.random() < 0.6:
            index = dice.choice(free)
            at[index], outputs[name], tables[name] = (
                name,
                [],
                small_table(10 * dice.randrange(5)) if dice.random() < 0.8 else None,
            )
            rows.add(index, tables[name], outputs[name])
        if at and dice.random() < 0.3:
            index = dice.choice(list(at))
            rows.remove(index)
            del at[index]
        if at and dice.random() < 0.5:
            source, target = dice.choice(list(at)), dice.randrange(8)
            if source != target:
                swap = dice.random() < 0.5
                moved, displaced = at.pop(source), at.pop(target, None)
                at[target] = moved
                if swap and displaced is not None:
                    at[source] = displaced
                rows.move(source, target, swap)
        constrained, row_index, token_index = rows.gather()
        expected = set()
        for index, known in at.items():
            table, node = tables[known], 0
            if table is None:
                continue
            for token in outputs[known]:
                node = table.advance(node, token)
            if node != END:
                expected |= {(index, token) for token in table.allowed(node).tolist()}
        assert set(zip(row_index.tolist(), token_index.tolist(), strict=True)) == expected
        assert set(constrained.tolist()) == {index for index, _ in expected}
        for known in at.values():
            table, node = tables[known], 0
            if table is not None:
                for token in outputs[known]:
                    node = table.advance(node, token)
                if node != END and dice.random() < 0.7:
                    outputs[known].append(dice.choice(table.allowed(node).tolist()))


def test_a_token_outside_its_table_is_counted_and_raises_nothing():
    rows, output = LegalRows(), [3]
    rows.add(0, small_table(10), output)
    assert [len(part) for part in rows.gather()] == [0, 0, 0]
    assert rows.strays == 1


def test_tables_are_parsed_once_and_the_memo_is_bounded():
    memo = TableMemo(vocabulary_size=100, size=2)
    first = memo.get(small_table(0).to_bytes())
    assert memo.get(small_table(0).to_bytes()) is first
    memo.get(small_table(10).to_bytes())
    memo.get(small_table(20).to_bytes())
    assert memo.get(small_table(0).to_bytes()) is not first
