"""A file counts only under the name that it was written for: a copy under another name is told, and no row counts twice."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entente.telemetry.errors import DataError
from storage.index import Index, open_index
from storage.ledger import ledger_path, read_ledger, write_ledger
from storage.outcome import Outcome, outcome_path, read_outcome, write_outcome
from storage.retention import retention_facts
from storage.runs import RunPaths
from storage.shards import open_plies


@pytest.fixture
def ledger(paths: RunPaths, publish: Callable[..., Any]) -> Path:
    """The ledger of step 40 of a run."""
    publish(range(3), forks=4)
    rows, _ = open_index(paths).select_batch(40, policy_version=0, start_groups=9)
    assert rows.num_rows and write_ledger(paths, 40, rows, {"policy_version": "39"})
    return ledger_path(paths, 40)


READERS: dict[str, Callable[[RunPaths, int], object]] = {
    "read_ledger": read_ledger,
    "index": lambda paths, step: Index(paths).refresh(),
    "retention": lambda paths, step: retention_facts(paths, ()),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_a_ledger_under_another_name_is_refused_wherever_it_is_read(
    paths: RunPaths, ledger: Path, read: Callable[[RunPaths, int], object]
) -> None:
    read(paths, 40)
    copy = ledger_path(paths, 41)
    shutil.copyfile(ledger, copy)
    with pytest.raises(DataError, match=f"{copy.name} records step 40, which"):
        read(paths, 41)


@pytest.mark.parametrize("name", ["p0/000007.arrow", "other/000000.arrow"])
def test_a_shard_under_another_name_is_set_aside_and_its_rows_count_once(
    paths: RunPaths, publish: Callable[..., Any], name: str
) -> None:
    shard, decisions = publish(range(1))
    copy = paths.shards / name
    copy.parent.mkdir(exist_ok=True)
    shutil.copyfile(shard.path, copy)
    if copy.parent != shard.path.parent:
        shutil.copyfile(shard.plies_path, copy.with_name(shard.plies_path.name))
    index = Index(paths)
    assert index.refresh() == len(decisions)
    ((refused, sentence),) = index.refused
    assert refused == name and "was written as p0/000000.arrow" in sentence


def test_plies_of_other_rows_are_not_read_under_a_shard_s_name(paths: RunPaths, publish: Callable[..., Any]) -> None:
    one, _ = publish(range(1))
    other, _ = publish(range(1, 2))
    one.plies_path.unlink()
    shutil.copyfile(other.plies_path, one.plies_path)
    with pytest.raises(DataError, match="does not have the plies of its name"):
        open_plies(one.path)


def test_an_outcome_under_another_name_is_refused(paths: RunPaths) -> None:
    outcome = Outcome(updates=[], device="cpu", threads=1, torch="2")
    write_outcome(paths, 40, outcome)
    assert read_outcome(paths, 40) == outcome
    shutil.copyfile(outcome_path(paths, 40), outcome_path(paths, 41))
    with pytest.raises(DataError, match="is the outcome of step 40: it"):
        read_outcome(paths, 41)
