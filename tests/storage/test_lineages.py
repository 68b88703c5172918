"""A fork counts what its parent used before it, and nothing that came after."""

import random
from typing import Any

import pyarrow as pa
import pytest

from storage.asking import connect
from storage.index import open_index
from storage.ledger import ROWS_SCHEMA, ledger_path, write_ledger
from storage.lineages import (
    NO_STEP_LIMIT,
    counts_as_used,
    current_lineage,
    last_step,
    lineage_at,
    lineage_path,
    open_lineage,
    read_lineage,
    step_numbers,
)
from storage.runs import RunPaths
from storage.selection import SelectionQuery
from storage.shards import publish_shard
from telemetry.errors import DataError, InputError


def fork(paths: RunPaths, name: str, parent: str, after_step: int, settings_hash: str = "new") -> None:
    open_lineage(paths, name, parent=parent, after_step=after_step, settings_hash=settings_hash, changed={"a.b": [1, 2]})


def record(paths: RunPaths, lineage: str, *steps: int) -> None:
    for step in steps:
        assert write_ledger(paths, lineage, step, ROWS_SCHEMA.empty_table(), {})


def test_a_run_that_never_forked_is_in_main(paths: RunPaths) -> None:
    assert (current_lineage(paths), last_step(paths), counts_as_used(paths, "main")) == ("main", 0, {"main": NO_STEP_LIMIT})
    record(paths, "main", 1, 2)
    assert (last_step(paths), lineage_at(paths, 2), read_lineage(paths, "main")) == (2, "main", None)


def test_forks_of_forks_take_over_what_came_before_each_fork(paths: RunPaths) -> None:
    record(paths, "main", 1, 2, 3, 4)
    fork(paths, "hot", "main", 3)
    assert (current_lineage(paths), last_step(paths)) == ("hot", 3)
    record(paths, "hot", 4, 5, 6)
    fork(paths, "cold", "hot", 5)
    assert (current_lineage(paths), last_step(paths)) == ("cold", 5)
    record(paths, "cold", 6)
    assert counts_as_used(paths, "cold") == {"cold": NO_STEP_LIMIT, "hot": 5, "main": 3}
    assert counts_as_used(paths, "cold", before_step=5) == {"cold": 4, "hot": 4, "main": 3}
    assert counts_as_used(paths, "main") == {"main": NO_STEP_LIMIT}
    assert [lineage_at(paths, step) for step in range(1, 8)] == ["main"] * 3 + ["hot"] * 2 + ["cold"] * 2
    assert lineage_at(paths, 6, "hot") == "hot"


def test_a_fork_uses_again_what_its_parent_used_after_it_and_nothing_before(paths: RunPaths, rows: Any) -> None:
    rng = random.Random(2)
    for number in range(6):
        decisions, plies = rows.make_shard_rows(rng, range(number, number + 1), forks=6)
        publish_shard(paths, "p0", number, decisions, plies, {})
    index = open_index(paths)

    def step(number: int, lineage: str) -> pa.Table:
        query = SelectionQuery(step=number, policy_version=0, max_policy_lag=9, start_groups=2, lineage=lineage, seed=0)
        chosen = index.select_batch(query).rows
        assert write_ledger(paths, lineage, number, chosen, {})
        index.refresh()
        return chosen

    def ids(*tables: pa.Table) -> set[int]:
        return {row for table in tables for row in table["decision_id"].to_pylist()}

    first, second, third = (step(number, "main") for number in (1, 2, 3))
    fork(paths, "hot", "main", 1)
    taken = [step(number, "hot") for number in (2, 3)]
    assert not ids(first) & ids(*taken)
    assert ids(*taken) == ids(second, third), "all that was left after step 1"
    with connect(paths.root) as asked:
        history = asked.sql("select lineage, step, list(decision_id order by place) from trained group by all order by step")
        named = [("main", 1), ("hot", 2), ("hot", 3)]
        found = [(*name, table["decision_id"].to_pylist()) for name, table in zip(named, (first, *taken), strict=True)]
        assert history.fetchall() == found, "the one history that led here"


@pytest.mark.parametrize(
    ("name", "steps", "after"), [("main", (), 1), ("hot", (2,), 1), ("..", (), 1)], ids=["main", "begun", "path"]
)
def test_a_name_that_is_taken_is_refused(paths: RunPaths, name: str, steps: tuple[int, ...], after: int) -> None:
    record(paths, "main", 1)
    fork(paths, "hot", "main", 1)
    record(paths, "hot", *steps)
    with pytest.raises(InputError, match=r"choose another name|cannot name a folder"):
        fork(paths, name, "main", after)


def test_a_fork_that_a_crash_cut_is_opened_again_if_it_is_the_same(paths: RunPaths) -> None:
    record(paths, "main", 1)
    fork(paths, "hot", "main", 1)
    before = lineage_path(paths, "hot").read_bytes()
    fork(paths, "hot", "main", 1)
    assert lineage_path(paths, "hot").read_bytes() == before
    with pytest.raises(InputError, match="for other settings"):
        fork(paths, "hot", "main", 1, settings_hash="others")


def test_an_altered_record_is_an_error_and_never_an_unused_row(paths: RunPaths) -> None:
    fork(paths, "hot", "main", 0)
    lineage_path(paths, "hot").write_text("{")
    for ask in (lambda: counts_as_used(paths, "hot"), lambda: current_lineage(paths)):
        with pytest.raises(DataError, match=r"lineage\.json"):
            ask()


def test_the_ledgers_of_a_fork_lie_in_a_folder_of_their_own(paths: RunPaths) -> None:
    fork(paths, "hot", "main", 0)
    record(paths, "hot", 1)
    assert ledger_path(paths, "hot", 1).parent == lineage_path(paths, "hot").parent == paths.ledger / "hot"


def test_a_fork_with_steps_of_another_size_numbers_its_start_groups_behind_all_published_ones(paths: RunPaths) -> None:
    assert [step_numbers(paths, 8).first_of(step) for step in (1, 2, 5)] == [0, 8, 32]
    record(paths, "main", 1, 2, 3)
    open_lineage(paths, "wide", parent="main", after_step=3, settings_hash="a", first_group=32)
    wide = step_numbers(paths, 20)
    assert [wide.first_of(step) for step in (4, 5, 6)] == [32, 52, 72]
    assert [wide.step_of(number) for number in (32, 51, 52, 72)] == [4, 4, 5, 6]
    assert wide.first_of(2) == 32, "what was played before the fork lies before it"
    record(paths, "wide", 4)
    open_lineage(paths, "hot", parent="wide", after_step=4, settings_hash="b")
    assert step_numbers(paths, 20) == wide, "its numbers go on"


def test_a_fork_that_is_opened_again_keeps_its_numbers(paths: RunPaths) -> None:
    about = {"parent": "main", "after_step": 0, "settings_hash": "a"}
    open_lineage(paths, "wide", **about, first_group=32)
    assert open_lineage(paths, "wide", **about).first_group == 32
    with pytest.raises(InputError, match="has a lineage 'wide' for other settings"):
        open_lineage(paths, "wide", **about, first_group=40)
