"""The index follows a run as it is written, hands on verified rows only, and leaves no way to write."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from entente.telemetry.errors import DataError
from storage.asking import connect
from storage.index import Index, open_index
from storage.ledger import read_ledger, write_ledger
from storage.runs import RunPaths
from storage.shards import open_shard

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


def test_a_recorded_step_gathers_to_the_same_batch(paths: RunPaths, publish: Any) -> None:
    publish(range(3), forks=5)
    index = open_index(paths)
    rows = index.select_batch(**ASKED)[0]
    write_ledger(paths, 1, rows, {})
    first, again = index.gather(rows), Index(paths).gather(read_ledger(paths, 1))
    for name in type(first).__slots__:
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name), name)


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
    assert connection.sql("SELECT DISTINCT phase FROM plies ORDER BY phase").fetchall() == [
        ("F1901M",),
        ("S1901M",),
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "COPY decisions TO '{outside}'",
        "SELECT * FROM read_text('{secret}')",
        "ATTACH '{outside}'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
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


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)
