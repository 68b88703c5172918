"""Distillation targets are published once, verified before use, chosen by a rule, and never used more often than allowed."""

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from entente.records.distil_target import DistilTarget
from entente.telemetry.errors import DataError
from storage.distil_store import DistilQuery, DistilStore, choose_distil_targets, distil_target_uses
from storage.distil_targets import DistilTargetRef, distil_target_path, ledger_entry, open_distil_targets, publish_distil_targets
from storage.gather import ShardDamaged
from storage.ledger import ROWS_SCHEMA, write_ledger
from storage.runs import RunPaths
from tests.storage.make_rows import make_distil_target

QUERY = DistilQuery(round="r", count=3, max_uses=2)


@pytest.fixture
def distil_targets(rng: random.Random) -> list[DistilTarget]:
    return [make_distil_target(rng, number) for number in range(8)]


@pytest.fixture
def published(paths: RunPaths, distil_targets: list[DistilTarget]) -> list[Path]:
    """Two files of four distillation targets each."""
    for first in (0, 4):
        assert publish_distil_targets(paths, "r", first, distil_targets[first : first + 4], {"teacher": "{}"})
    return [distil_target_path(paths, "r", first) for first in (0, 4)]


def record(paths: RunPaths, step: int, chosen: list[DistilTargetRef]) -> None:
    assert write_ledger(paths, step, ROWS_SCHEMA.empty_table(), ledger_entry(chosen))


def test_a_second_attempt_publishes_nothing(paths, distil_targets, published):
    before = published[0].read_bytes()
    assert not publish_distil_targets(paths, "r", 0, distil_targets[4:], {})
    assert published[0].read_bytes() == before
    table = open_distil_targets(published[0]).table
    assert table["distil_target_id"].to_pylist() == [distil_target.distil_target_id for distil_target in distil_targets[:4]]
    assert table["completion_ids"].to_pylist() == [distil_target.completion_ids for distil_target in distil_targets[:4]]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda distil_target: {"completion_ids": [999, *distil_target.completion_ids[1:]]}, "orders that are not legal there"),
        (
            lambda distil_target: (
                {"probabilities": [0.5] * len(distil_target.probabilities)} | {"visits": distil_target.visits[1:]}
            ),
            "visits differ, or are 0",
        ),
        (lambda distil_target: {"probabilities": [0.4] * len(distil_target.probabilities)}, "do not add up to 1"),
        (lambda distil_target: {"probabilities": [float("nan")] * len(distil_target.probabilities)}, "do not add up to 1"),
        (lambda distil_target: {"legal_offsets": distil_target.legal_offsets[:-1]}, "offsets do not fit"),
    ],
    ids=["illegal answer", "lengths", "sum", "not a number", "offsets"],
)
def test_a_faulty_distil_target_is_named_and_nothing_is_written(paths, distil_targets, fault, why):
    distil_targets[2] = replace(distil_targets[2], **fault(distil_targets[2]))
    with pytest.raises(DataError, match=rf"distillation target of FRANCE at S1901M.*{why}.*nothing was written"):
        publish_distil_targets(paths, "r", 0, distil_targets, {})
    assert not distil_target_path(paths, "r", 0).exists()


def test_a_copied_file_is_refused(paths, published):
    copy = published[0].with_name("000009.arrow")
    copy.write_bytes(published[0].read_bytes())
    with pytest.raises(DataError, match=r"was written as r/000000.arrow"):
        open_distil_targets(copy)


@pytest.mark.parametrize("opened_before", [False, True], ids=["before it is opened", "after it was verified"])
def test_a_flipped_bit_is_found_and_the_file_set_aside(paths, distil_targets, published, opened_before):
    store = DistilStore(paths, 0)
    chosen = store.choose(DistilQuery(round="r", count=8, max_uses=1)) if opened_before else []
    content = bytearray(published[0].read_bytes())
    place = bytes(content).index(np.array(distil_targets[1].completion_ids, np.int32).tobytes())
    content[place] ^= 4
    with open(published[0], "r+b") as file:  # in place: the mapping sees it
        file.write(content)
        os.fsync(file.fileno())
    if opened_before:
        with pytest.raises(ShardDamaged, match=r"r/000000.arrow changed"):
            store.gather(chosen)
    left = store.choose(DistilQuery(round="r", count=8, max_uses=1))
    assert {distil_target.shard for distil_target in left} == {"r/000004.arrow"} and len(left) == 4
    assert len(store.refused) == 1 and not published[0].exists() and len(list(published[0].parent.glob(".*.damaged-*"))) == 1
    store.gather(left)


def test_a_distil_target_that_is_not_the_one_named_is_refused(paths, published):
    store = DistilStore(paths, 0)
    first, *_ = store.choose(QUERY)
    for wrong in (replace(first, checksum=first.checksum ^ 1), replace(first, row=99), replace(first, shard="r/000099.arrow")):
        with pytest.raises(ShardDamaged):
            DistilStore(paths, 0).gather([wrong])


def test_gathered_rows_are_the_proposals_with_a_probability(paths, distil_targets, published):
    """By plain loops over the distillation targets as they were made."""
    store = DistilStore(paths, 0)
    chosen = store.choose(DistilQuery(round="r", count=5, max_uses=1))
    found, by_id = store.gather(chosen), {distil_target.distil_target_id: distil_target for distil_target in distil_targets}
    wanted = []
    for number, named in enumerate(chosen):
        distil_target = by_id[named.distil_target_id]
        for proposal, probability in enumerate(distil_target.probabilities):
            first, after = distil_target.completion_offsets[proposal : proposal + 2]
            ends = [distil_target.legal_offsets[place : place + 2] for place in range(first, after)]
            sets = [list(distil_target.legal_ids[begin:end]) for begin, end in ends]
            ids = [*distil_target.prompt_ids, *distil_target.completion_ids[first:after]]
            if probability:
                wanted.append(
                    (ids, len(distil_target.prompt_ids), sets, pytest.approx(probability), number, distil_target.distil_target_id)
                )
    batch, rows = found.batch, []
    for row in range(len(found.weights)):
        places = range(batch.completion_offsets[row], batch.completion_offsets[row + 1])
        sets = [batch.legal_ids[batch.legal_offsets[place] : batch.legal_offsets[place + 1]].tolist() for place in places]
        ids = batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]].tolist()
        about = (float(found.weights[row]), int(batch.advantage_groups[row]), int(batch.decision_ids[row]))
        rows.append((ids, int(batch.prompt_lens[row]), sets, *about))
    assert rows == wanted and set(batch.temperatures.tolist()) == {0.5}


def test_every_distil_target_is_used_as_often_as_allowed_and_the_least_used_first(paths, distil_targets, published):
    """Over restarts before each step: how often a distillation target was used is read from the ledgers."""
    uses, step = Counter(), 0
    while chosen := (store := DistilStore(paths, 3)).choose(QUERY):
        step += 1
        assert store.left(QUERY) == 8 * 2 - sum(uses.values())
        assert (
            sorted(uses[distil_target.distil_target_id] for distil_target in chosen)
            == sorted(uses[each.distil_target_id] for each in distil_targets)[: len(chosen)]
        )
        uses.update(distil_target.distil_target_id for distil_target in chosen)
        record(paths, step, chosen)
    assert step == 6 and set(uses.values()) == {2} and len(uses) == 8
    assert distil_target_uses(paths) == uses


def test_a_store_counts_the_uses_of_its_own_steps(paths, published):
    store = DistilStore(paths, 3)
    first = store.choose(QUERY)
    record(paths, 1, first)
    store.count(first)
    assert store.choose(QUERY) == DistilStore(paths, 3).choose(QUERY)
    assert store.left(QUERY) == 13


def test_a_step_takes_the_decisions_of_a_position_together():
    known = {DistilTargetRef("r/0.arrow", row, row, 0): f"position {row % 6}" for row in range(48)}
    chosen = choose_distil_targets(known, {}, DistilQuery(round="r", count=16, max_uses=1), 0)
    assert len(chosen) == 16 and len({known[distil_target] for distil_target in chosen}) == 2


def test_the_choice_depends_on_the_distil_targets_and_the_seed_alone(paths, published):
    found = DistilStore(paths, 0).choose(DistilQuery(round="r", count=99, max_uses=1))
    known = {distil_target: str(distil_target.distil_target_id) for distil_target in found}
    chosen = choose_distil_targets(known, {}, QUERY, 0)
    assert chosen == choose_distil_targets(dict(reversed(known.items())), {}, QUERY, 0)
    assert any(chosen != choose_distil_targets(known, {}, QUERY, seed) for seed in range(1, 9))
