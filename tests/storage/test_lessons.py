"""Lessons are published once, verified before use, chosen by a rule, and never used more often than allowed."""

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from entente.records.lesson import Lesson
from entente.telemetry.errors import DataError
from storage.gather import ShardDamaged
from storage.ledger import ROWS_SCHEMA, write_ledger
from storage.lesson_shelf import LessonQuery, LessonShelf, choose_lessons, lesson_uses
from storage.lessons import LessonRef, ledger_entry, lesson_path, open_lessons, publish_lessons
from storage.runs import RunPaths
from tests.storage.make_rows import make_lesson

QUERY = LessonQuery(round="r", count=3, max_uses=2)


@pytest.fixture
def lessons(rng: random.Random) -> list[Lesson]:
    return [make_lesson(rng, number) for number in range(8)]


@pytest.fixture
def published(paths: RunPaths, lessons: list[Lesson]) -> list[Path]:
    """Two files of four lessons each."""
    for first in (0, 4):
        assert publish_lessons(paths, "r", first, lessons[first : first + 4], {"teacher": "{}"})
    return [lesson_path(paths, "r", first) for first in (0, 4)]


def record(paths: RunPaths, step: int, chosen: list[LessonRef]) -> None:
    assert write_ledger(paths, step, ROWS_SCHEMA.empty_table(), ledger_entry(chosen))


def test_a_second_attempt_publishes_nothing(paths, lessons, published):
    before = published[0].read_bytes()
    assert not publish_lessons(paths, "r", 0, lessons[4:], {})
    assert published[0].read_bytes() == before
    table = open_lessons(published[0]).table
    assert table["lesson_id"].to_pylist() == [lesson.lesson_id for lesson in lessons[:4]]
    assert table["completion_ids"].to_pylist() == [lesson.completion_ids for lesson in lessons[:4]]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda lesson: {"completion_ids": [999, *lesson.completion_ids[1:]]}, "orders that are not legal there"),
        (
            lambda lesson: {"probabilities": [0.5] * len(lesson.probabilities)} | {"visits": lesson.visits[1:]},
            "visits differ, or are 0",
        ),
        (lambda lesson: {"probabilities": [0.4] * len(lesson.probabilities)}, "do not add up to 1"),
        (lambda lesson: {"probabilities": [float("nan")] * len(lesson.probabilities)}, "do not add up to 1"),
        (lambda lesson: {"legal_offsets": lesson.legal_offsets[:-1]}, "offsets do not fit"),
    ],
    ids=["illegal answer", "lengths", "sum", "not a number", "offsets"],
)
def test_a_faulty_lesson_is_named_and_nothing_is_written(paths, lessons, fault, why):
    lessons[2] = replace(lessons[2], **fault(lessons[2]))
    with pytest.raises(DataError, match=rf"lesson of FRANCE at S1901M.*{why}.*nothing was written"):
        publish_lessons(paths, "r", 0, lessons, {})
    assert not lesson_path(paths, "r", 0).exists()


def test_a_copied_file_is_refused(paths, published):
    copy = published[0].with_name("000009.arrow")
    copy.write_bytes(published[0].read_bytes())
    with pytest.raises(DataError, match=r"was written as r/000000.arrow"):
        open_lessons(copy)


@pytest.mark.parametrize("opened_before", [False, True], ids=["before it is opened", "after it was verified"])
def test_a_flipped_bit_is_found_and_the_file_set_aside(paths, lessons, published, opened_before):
    shelf = LessonShelf(paths, 0)
    chosen = shelf.choose(LessonQuery(round="r", count=8, max_uses=1)) if opened_before else []
    content = bytearray(published[0].read_bytes())
    place = bytes(content).index(np.array(lessons[1].completion_ids, np.int32).tobytes())
    content[place] ^= 4
    with open(published[0], "r+b") as file:  # in place: the mapping sees it
        file.write(content)
        os.fsync(file.fileno())
    if opened_before:
        with pytest.raises(ShardDamaged, match=r"r/000000.arrow changed"):
            shelf.gather(chosen)
    left = shelf.choose(LessonQuery(round="r", count=8, max_uses=1))
    assert {lesson.shard for lesson in left} == {"r/000004.arrow"} and len(left) == 4
    assert len(shelf.refused) == 1 and not published[0].exists() and len(list(published[0].parent.glob(".*.damaged-*"))) == 1
    shelf.gather(left)


def test_a_lesson_that_is_not_the_one_named_is_refused(paths, published):
    shelf = LessonShelf(paths, 0)
    first, *_ = shelf.choose(QUERY)
    for wrong in (replace(first, checksum=first.checksum ^ 1), replace(first, row=99), replace(first, shard="r/000099.arrow")):
        with pytest.raises(ShardDamaged):
            LessonShelf(paths, 0).gather([wrong])


def test_gathered_rows_are_the_proposals_with_a_probability(paths, lessons, published):
    """By plain loops over the lessons as they were made."""
    shelf = LessonShelf(paths, 0)
    chosen = shelf.choose(LessonQuery(round="r", count=5, max_uses=1))
    found, by_id = shelf.gather(chosen), {lesson.lesson_id: lesson for lesson in lessons}
    wanted = []
    for number, named in enumerate(chosen):
        lesson = by_id[named.lesson_id]
        for proposal, probability in enumerate(lesson.probabilities):
            first, after = lesson.completion_offsets[proposal : proposal + 2]
            ends = [lesson.legal_offsets[place : place + 2] for place in range(first, after)]
            sets = [list(lesson.legal_ids[begin:end]) for begin, end in ends]
            ids = [*lesson.prompt_ids, *lesson.completion_ids[first:after]]
            if probability:
                wanted.append((ids, len(lesson.prompt_ids), sets, pytest.approx(probability), number, lesson.lesson_id))
    batch, rows = found.batch, []
    for row in range(len(found.weights)):
        places = range(batch.completion_offsets[row], batch.completion_offsets[row + 1])
        sets = [batch.legal_ids[batch.legal_offsets[place] : batch.legal_offsets[place + 1]].tolist() for place in places]
        ids = batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]].tolist()
        about = (float(found.weights[row]), int(batch.advantage_groups[row]), int(batch.decision_ids[row]))
        rows.append((ids, int(batch.prompt_lens[row]), sets, *about))
    assert rows == wanted and set(batch.temperatures.tolist()) == {0.5}


def test_every_lesson_is_used_as_often_as_allowed_and_the_least_used_first(paths, lessons, published):
    """Over restarts before each step: how often a lesson was used is read from the ledgers."""
    uses, step = Counter(), 0
    while chosen := (shelf := LessonShelf(paths, 3)).choose(QUERY):
        step += 1
        assert shelf.left(QUERY) == 8 * 2 - sum(uses.values())
        assert (
            sorted(uses[lesson.lesson_id] for lesson in chosen) == sorted(uses[each.lesson_id] for each in lessons)[: len(chosen)]
        )
        uses.update(lesson.lesson_id for lesson in chosen)
        record(paths, step, chosen)
    assert step == 6 and set(uses.values()) == {2} and len(uses) == 8
    assert lesson_uses(paths) == uses


def test_a_shelf_counts_the_uses_of_its_own_steps(paths, published):
    shelf = LessonShelf(paths, 3)
    first = shelf.choose(QUERY)
    record(paths, 1, first)
    shelf.count(first)
    assert shelf.choose(QUERY) == LessonShelf(paths, 3).choose(QUERY)
    assert shelf.left(QUERY) == 13


def test_a_step_takes_the_decisions_of_a_position_together():
    known = {LessonRef("r/0.arrow", row, row, 0): f"position {row % 6}" for row in range(48)}
    chosen = choose_lessons(known, {}, LessonQuery(round="r", count=16, max_uses=1), 0)
    assert len(chosen) == 16 and len({known[lesson] for lesson in chosen}) == 2


def test_the_choice_depends_on_the_lessons_and_the_seed_alone(paths, published):
    found = LessonShelf(paths, 0).choose(LessonQuery(round="r", count=99, max_uses=1))
    known = {lesson: str(lesson.lesson_id) for lesson in found}
    chosen = choose_lessons(known, {}, QUERY, 0)
    assert chosen == choose_lessons(dict(reversed(known.items())), {}, QUERY, 0)
    assert any(chosen != choose_lessons(known, {}, QUERY, seed) for seed in range(1, 9))
