"""An index within the staleness budget chooses what one with every fact chooses, and reads nothing older."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from storage.index import Index, open_index
from storage.ledger import write_ledger
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.shards import publish_shard
from tests.storage.make_rows import make_shard_rows

LAG = 2


def asked(step: int) -> dict[str, int]:
    return {"step": step, "policy_version": step - 1}


def publish_some(paths: RunPaths, rng: random.Random, step: int) -> None:
    """Shards of one or two start groups of mixed versions, some of them late, one fork in thirty failed."""
    for producer in ("p0", "p1"):
        for first in (10 * step, 10 * step + 5):
            versions = [max(0, step - 1 - rng.choice([0, 0, 1, 4])), max(0, step - 1 - rng.choice([0, 3]))]
            decisions, plies = make_shard_rows(rng, range(first, first + rng.choice([1, 1, 2])), producer)
            mixed = [
                replace(row, policy_version=versions[row.fork % 2], status="failed" if rng.random() < 0.03 else "complete")
                for row in decisions
            ]
            publish_shard(paths, producer, first, mixed, plies, {})


@pytest.mark.parametrize("uses", [1, 2])
def test_every_step_chooses_what_it_would_choose_with_every_fact(paths: RunPaths, uses: int) -> None:
    storage = StorageSettings(max_policy_lag=LAG, max_uses=uses)
    rng, kept = random.Random(uses), Index(paths, storage, seed=3, oldest=-LAG)
    expired = 0
    for step in range(1, 9):
        publish_some(paths, rng, step)
        kept.refresh()
        whole, late = open_index(paths, storage, seed=3), open_index(paths, storage, seed=3, oldest=step - 1 - LAG)
        expected, counts = whole.select_batch(**asked(step), start_groups=2)
        could = kept.eligible(**asked(step))
        assert could.expired >= expired, "what became too old is counted once and for all"
        expired = could.expired
        for index in (kept, late):
            chosen, seen = index.select_batch(**asked(step), start_groups=2)
            assert chosen.equals(expected)
            for name in ("eligible", "chosen", "waiting", "ahead", "no_spread"):
                assert seen[name] == counts[name], name
            found, everything = index.eligible(**asked(step)), whole.eligible(**asked(step))
            assert (found.start_groups, found.advantage_groups) == (everything.start_groups, everything.advantage_groups)
        assert kept.select_batch(**asked(step), start_groups=2)[1]["unusable"] <= counts["unusable"]
        assert write_ledger(paths, step, expected, {})
    assert expired > 0


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards and ledgers whose rows are read."""
    names: list[str] = []

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path, *given: names.append(path.name) or work(path, *given)

    for name in ("map_arrow", "read_ledger_file"):
        monkeypatch.setattr(f"storage.index.{name}", noting(getattr(__import__("storage.index").index, name)))
    return names


def test_neither_rows_nor_ledgers_of_the_past_are_read_and_each_shard_is_read_once(
    paths: RunPaths, publish: Callable[..., Any], read: list[str]
) -> None:
    for version in range(8):
        publish(range(version, version + 1), policy_version=version, forks=4)
        chosen, _ = open_index(paths).select_batch(**asked(version + 1), start_groups=2)
        assert write_ledger(paths, version + 1, chosen, {})
    read.clear()
    index = open_index(paths, oldest=8 - LAG)
    assert sorted(read) == ["000006.arrow", "000007.arrow", "step-000007.arrow", "step-000008.arrow"]
    publish(range(8, 9), policy_version=8, forks=4)
    publish(range(9, 10), policy_version=1, forks=4)
    assert index.refresh() == 16 and index.refresh() == 0
    assert read[4:] == ["000008.arrow"], "a late shard of an old version is not read"
    for step in range(9, 12):
        index.select_batch(**asked(step), start_groups=2)
        held = {shard for (shard,) in index.connection.sql("SELECT DISTINCT shard FROM decisions").fetchall()}
        assert held == {f"p0/{number:06d}.arrow" for number in range(step - 1 - LAG, 9)}
    assert len(read) == 5
