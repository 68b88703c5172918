"""The index follows a run as it is written, hands on verified rows only, reads no more than it needs, and cannot write."""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from entente.telemetry.errors import DataError
from storage import shards
from storage.gather import MappedShards, ShardDamaged, gather
from storage.index import Index, open_index
from storage.ledger import write_ledger
from storage.run_sql import connect
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.shards import coverage, open_shard, publish_shard
from tests.damage import flip
from tests.storage.make_rows import make_shard_rows

ASKED = {"step": 1, "policy_version": 0, "start_groups": 99}


def test_a_batch_holds_the_published_tokens_in_the_order_of_the_selection(paths: RunPaths, publish: Any) -> None:
    published = {}
    for first, producer in ((0, "p0"), (0, "p1"), (2, "p0")):
        published |= {row.decision_id: row for row in publish(range(first, first + 2), producer, forks=6)[1]}
    index = Index(paths)
    assert index.refresh() == len(published) == 144
    rows = index.select_batch(**ASKED)[0]
    shuffled = rows.take(np.random.default_rng(0).permutation(rows.num_rows))
    batch = index.gather(shuffled)
    assert batch.decision_ids.tolist() == shuffled["decision_id"].to_pylist()
    assert len(batch.decision_ids) > 60
    for row, number in enumerate(batch.decision_ids.tolist()):
        source = published[number]
        assert batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]].tolist() == source.input_ids
        assert batch.prompt_lens[row] == source.prompt_len
        positions = range(batch.completion_offsets[row], batch.completion_offsets[row + 1])
        assert batch.behaviour_logprobs[positions.start : positions.stop].tolist() == source.behaviour_logprobs
        legal = [batch.legal_ids[batch.legal_offsets[at] : batch.legal_offsets[at + 1]].tolist() for at in positions]
        bounds = source.legal_offsets
        assert legal == [list(source.legal_ids[low:high]) for low, high in pairwise(bounds)]
    assert batch.returns.tolist() == shuffled["return"].to_pylist()
    assert batch.advantage_groups.tolist() == shuffled["advantage_group"].to_pylist()
    assert len(batch.legal_ids) == batch.legal_offsets[-1]


def test_token_counts_are_those_of_the_rows(paths: RunPaths, publish: Any) -> None:
    _, decisions = publish(range(2))
    publish(
        range(2, 3),
        forks=1,
        input_ids=[1],
        prompt_len=1,
        behaviour_logprobs=[],
        legal_ids=[],
        legal_offsets=[0],
    )
    index = open_index(paths)
    found = index.connection.sql(
        "SELECT decision_id, n_prompt, n_completion, n_branching FROM decisions WHERE start_group < 2"
    ).fetchall()
    expected = [
        (row.decision_id, row.prompt_len, len(row.behaviour_logprobs), sum(np.diff(row.legal_offsets) > 1)) for row in decisions
    ]
    assert sorted(found) == sorted(expected)
    assert index.connection.sql("SELECT DISTINCT n_completion, n_branching FROM decisions WHERE start_group = 2").fetchall() == [
        (0, 0)
    ]


def test_fresh_rows_are_complete_rows_of_exactly_that_version(paths: RunPaths, publish: Any) -> None:
    publish(range(1), policy_version=3)
    _, wanted = publish(range(1, 2), policy_version=4)
    publish(range(2, 3), policy_version=4, status="failed")
    publish(range(3, 4), policy_version=5)
    index = open_index(paths)
    rows = index.fresh_rows(policy_version=4, limit=99)
    assert sorted(rows["decision_id"].to_pylist()) == sorted(row.decision_id for row in wanted)
    assert index.fresh_rows(policy_version=4, limit=5).equals(rows.slice(0, 5))
    assert set(index.gather(rows).advantage_groups.tolist()) == {-1}


def test_a_shard_damaged_after_it_was_mapped_is_named_and_set_aside(paths: RunPaths, publish: Any) -> None:
    shard, _ = publish(range(2), forks=6)
    publish(range(2, 4), forks=6)
    index = open_index(paths)
    before = index.select_batch(**ASKED)[0]
    tokens = np.asarray(open_shard(shard.path)["input_ids"].chunk(0).values).tobytes()
    with shard.path.open("r+b", buffering=0) as file:  # in place, below the mapping, as no one may
        place = shard.path.read_bytes().index(tokens) + 40
        os.pwrite(file.fileno(), bytes([tokens[40] ^ 4]), place)
    with pytest.raises(DataError, match=r"p0/000000.arrow changed since it was opened"):
        index.gather(before)
    after = index.select_batch(**ASKED)[0]
    assert set(after["shard"].to_pylist()) == {"p0/000002.arrow"}
    index.gather(after)
    assert [shard for shard, _ in index.refused] == ["p0/000000.arrow"]


@pytest.mark.parametrize("change", ["damaged", "replaced"])
def test_a_recorded_step_is_never_repeated_with_other_rows(paths: RunPaths, publish: Any, change: str) -> None:
    shard, _ = publish(range(3), forks=6)
    index = open_index(paths)
    rows = index.select_batch(**ASKED)[0]
    if change == "damaged":
        damage(shard.path)
    else:
        shard.path.unlink()
        publish(range(3), forks=6)
    with pytest.raises(DataError, match=r"000000\.arrow"):
        Index(paths).gather(rows)


def test_views_answer_ordinary_questions(paths: RunPaths, publish: Any) -> None:
    publish(range(2), forks=6)
    index = open_index(paths)
    rows = index.select_batch(**ASKED)[0]
    write_ledger(paths, 1, rows, {})
    connection = connect(paths.root)
    assert connection.sql("SELECT shard, row FROM batches WHERE step = 1 ORDER BY place").fetchall() == list(
        zip(rows["shard"].to_pylist(), rows["row"].to_pylist(), strict=True)
    )
    used = connection.sql('SELECT sum(n) FROM "groups" WHERE used = 1').fetchall()
    assert used == [(rows.num_rows,)]
    assert connection.sql('SELECT count(*), sum(n) FROM "groups"').fetchall() == [(8, 48)]
    assert connection.sql('SELECT count("return") FROM decisions').fetchall() == [(48,)]
    assert connection.sql("SELECT DISTINCT phase FROM phases ORDER BY phase").fetchall() == [
        ("F1901M",),
        ("S1901M",),
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "COPY decisions TO '{outside}'",
        "SELECT * FROM read_text('{secret}')",
        "ATTACH '{outside}'",
        "SET memory_limit = '1TB'",
        "SELECT * FROM python_table",
    ],
)
def test_a_connection_reaches_nothing_outside_itself(paths: RunPaths, publish: Any, tmp_path: Path, statement: str) -> None:
    publish(range(1))
    secret, outside = tmp_path / "secret.csv", tmp_path / "outside"
    secret.write_text("a,b\n1,2\n")
    python_table = open_shard(paths.shards / "p0" / "000000.arrow")
    before = sorted(tmp_path.rglob("*"))
    connection = connect(paths.root)
    with pytest.raises(duckdb.Error):
        connection.execute(statement.format(secret=secret, outside=outside)).fetchall()
    assert sorted(tmp_path.rglob("*")) == before
    assert python_table.num_rows == 12


# -- a trainer's index ----------------------------------------------------------------------------------------------------

LAG = 2


def asked(step: int) -> dict[str, int]:
    return {"step": step, "policy_version": step - 1}


def publish_some(paths: RunPaths, rng: random.Random, step: int) -> None:
    """Shards of one or two start groups of mixed versions, some of them late, one fork in thirty failed."""
    for producer in ("p0", "p1"):
        for first in (10 * step, 10 * step + 5):
            versions = [max(0, step - 1 - rng.choice([0, 0, 1, 4])), max(0, step - 1 - rng.choice([0, 3]))]
            decisions, phases = make_shard_rows(rng, range(first, first + rng.choice([1, 1, 2])), producer)
            mixed = [
                replace(row, policy_version=versions[row.fork % 2], status="failed" if rng.random() < 0.03 else "complete")
                for row in decisions
            ]
            publish_shard(paths, producer, first, mixed, phases, {})


@pytest.mark.parametrize("uses", [1, 2])
def test_every_step_chooses_what_it_would_choose_with_every_fact(paths: RunPaths, uses: int) -> None:
    storage = StorageSettings(max_policy_lag=LAG, max_uses=uses)
    rng, kept = random.Random(uses), Index(paths, storage, seed=3, oldest=-LAG)
    expired = 0
    for step in range(1, 7):
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
            for name in ("eligible", "chosen", "waiting", "ahead", "zero_std", "in_budget"):
                assert seen[name] == counts[name], name
            found, everything = index.eligible(**asked(step)), whole.eligible(**asked(step))
            assert (found.start_groups, found.advantage_groups) == (everything.start_groups, everything.advantage_groups)
        before, after = (index.connection.sql("FROM batches ORDER BY ALL").fetchall() for index in (kept, late))
        assert before == after, "a user's SQL counts as many uses after a resume"
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


# -- mapped shards -----------------------------------------------------------------------------------------------------------

MAPS = Path("/proc/self/maps")


def mappings(paths: RunPaths) -> int:
    """Files of the run's shards that this process has mapped."""
    return sum(str(paths.shards) in line for line in MAPS.read_text().splitlines())


@pytest.mark.skipif(not MAPS.exists(), reason="only Linux lists a process's mappings")
def test_no_more_shards_are_mapped_than_the_bound(
    paths: RunPaths, publish: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.gather.MAPPED", 4)
    for first in range(6):
        publish(range(first, first + 1), forks=6)
    index = Index(paths)
    assert index.refresh() == 6 * 24
    assert mappings(paths) <= 4, "taking shards in maps them, and lets go of them again"
    rows = index.fresh_rows(policy_version=0, limit=10_000)
    assert len(set(rows["shard"].to_pylist())) == 6
    batch = index.gather(rows)
    assert (len(batch.decision_ids), len(index._mapped)) == (rows.num_rows, 4)
    assert mappings(paths) <= 4


def test_the_shards_asked_for_last_stay_mapped(
    paths: RunPaths, publish: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was let go is read on by who holds it, also after retention took the file away."""
    names = [f"p0/{first:06d}.arrow" for first in range(3)]
    for first in range(3):
        publish(range(first, first + 1))
    monkeypatch.setattr("storage.gather.MAPPED", 2)
    shards = MappedShards(paths.shards)
    first, second, _ = shards.get(names[0]), shards.get(names[1]), shards.get(names[0])
    before = second.table["decision_id"].to_pylist()
    shards.get(names[2])
    assert shards.get(names[0]) is first
    (paths.shards / names[1]).unlink()
    assert second.is_unchanged() and second.table["decision_id"].to_pylist() == before
    with pytest.raises(ShardDamaged, match=r"000001\.arrow is missing"):
        shards.get(names[1])


def test_gathering_takes_no_heap_of_arrows_and_copies_nothing_but_the_batch(paths: RunPaths, publish: Callable[..., Any]) -> None:
    publish(range(3), forks=6)
    index = open_index(paths)
    rows = index.fresh_rows(policy_version=0, limit=10_000)
    shards = MappedShards(paths.shards)
    before = pa.total_allocated_bytes()
    assert not shards.get("p0/000000.arrow").table["input_ids"].chunk(0).values.to_numpy().flags.owndata
    assert pa.total_allocated_bytes() == before
    batch = gather(rows, shards.get)
    assert pa.total_allocated_bytes() == before
    assert batch.input_ids.flags.writeable and batch.input_ids.flags.owndata


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)


def test_a_new_shard_is_compared_with_no_other_shard_one_by_one(paths: RunPaths, publish: Any) -> None:
    """Each of 20,000 shards with all before it took minutes, each of 80,000 three quarters of an hour."""

    class Counted(tuple):
        reads = 0

        def __iter__(self) -> Any:
            Counted.reads += 1
            return super().__iter__()

    publish(range(2))
    index = open_index(paths)
    index._held = {name: replace(shard, start_groups=Counted(shard.start_groups)) for name, shard in index._held.items()}
    publish(range(2, 4))
    index.refresh()
    assert len(index._held) == 2 and not index.refused and Counted.reads == 0


def test_a_refresh_looks_at_the_names_of_new_files_alone(paths: RunPaths, publish: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refresh sorted all names of a long run, several times a step."""
    matched, pattern = list[str](), shards.SHARD_NAME
    counting = SimpleNamespace(fullmatch=lambda name: bool(matched.append(name)) or pattern.fullmatch(name))
    publish(range(2))
    index = open_index(paths)
    publish(range(2, 4))
    monkeypatch.setattr(shards, "SHARD_NAME", counting)
    assert index.refresh() and sorted(index.newest_versions) == ["p0/000000.arrow", "p0/000002.arrow"]
    assert len(matched) == 2 and all(name.startswith("000002") for name in matched), "the new shard and its phases"


def test_start_groups_of_a_damaged_shard_that_were_played_again_are_selected(paths: RunPaths, publish: Any) -> None:
    """As after a resume: the trainer reads the shards of later steps before the flow sets a damaged one aside and plays again."""
    publish(range(2), "local")
    damaged, decisions = publish(range(2, 4), "local")
    held = Index(paths, oldest=0)
    rows = open_index(paths).select_batch(**ASKED)[0]
    write_ledger(paths, 1, rows.filter(pc.equal(rows["start_group"], 2)), {})
    again = {path: path.read_bytes() for path in (damaged.phases_path, damaged.path)}
    flip(damaged.path)
    assert held.refresh() and [name for name, _ in held.refused] == ["local/000002.arrow"]
    assert coverage(paths, "local", 2, 2).missing == ((2, 2),)
    assert held.refresh() == 0
    for path, content in again.items():
        path.write_bytes(content)
    assert held.refresh() == len(decisions) and not held.refused and held.refresh() == 0
    selected, counts = held.select_batch(step=2, policy_version=0, start_groups=99)
    assert {*selected["start_group"].to_pylist()} == {0, 1, 3} and counts["used"], "a ledger has the rows of start group 2"


def test_a_trainer_s_index_without_a_shard_takes_the_ledgers_of_its_budget(paths: RunPaths, publish: Any) -> None:
    """As of two steps in a row without rows, or where all shards that a ledger names are damaged."""
    shard, _ = publish(range(2))
    rows = open_index(paths).select_batch(**ASKED)[0]
    for step, recorded in enumerate((rows, rows.slice(0, 0)), start=1):
        write_ledger(paths, step, recorded, {})
    flip(shard.path)
    index = open_index(paths, oldest=0)
    assert index.connection.sql("SELECT count(*) FROM batches").fetchall() == [(0,)] and len(index.refused) == 1
