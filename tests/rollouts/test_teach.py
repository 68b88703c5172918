"""Visits, the labels of a teacher, and the rounds that they belong to; with the real search and an engine that draws evenly."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import Failed

from entente.game.board import Board
from entente.players.search import SearchResult, search_apart
from entente.players.search_settings import SearchSettings
from entente.records.policy_version import BASE, PolicyVersion
from entente.rollouts import teach
from entente.rollouts.improve_rounds import ImproveSettings, begin_round, check_improve, check_student, end_round, open_rounds
from entente.rollouts.resources import RolloutResources
from entente.rollouts.settings import RolloutSettings
from entente.rollouts.teach import label, teacher_probabilities, visit
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import DataError, EngineError, InputError
from storage.distil_targets import distil_target_path, open_distil_targets
from storage.index import open_index
from storage.runs import RunPaths
from storage.shards import open_phases, open_shard, shard_path
from tasks.improve_policy import label_visits

SEARCH = SearchSettings(proposals=2, scripted=("mover",), playouts=20, player=("random",))
IMPROVE = ImproveSettings(positions=5, search=SEARCH)


class Here:
    """A teacher's pool in this process, which counts; `told` replaces an answer."""

    def __init__(self, told: Any = None) -> None:
        self.questions: list[tuple[Any, ...]] = []
        self._told = told

    async def ask(self, work: Callable[..., SearchResult], *question: Any) -> SearchResult:
        self.questions.append(question)
        found = await asyncio.to_thread(work, *question)
        return found if self._told is None else self._told(found)


@pytest.fixture
def resources(tmp_path, model, tokens, positions, host, uniform_engine, monkeypatch) -> RolloutResources:
    monkeypatch.setattr(teach, "VISITED_GROUPS", 2)
    return RolloutResources(
        paths=RunPaths(tmp_path / "mine").create(),
        model=model,
        seed=5,
        rollouts=RolloutSettings(start_groups=4, forks_per_group=3, horizon_years=1, temperature=0.8),
        cache=SimpleNamespace(train=positions),  # type: ignore[arg-type]
        host=host,
        engine=uniform_engine(),
        tokens=tokens,
        provenance={"run": "mine"},
    )


def test_visits_are_games_that_no_step_selects_and_a_second_visit_plays_nothing(resources):
    found = asyncio.run(visit(resources, 1, 2))
    shard = shard_path(resources.paths, "visit-round-0001", 2)
    rows = open_shard(shard)
    assert found == rows.num_rows > 3 and set(rows["fork"].to_pylist()) == {0}
    asked = len(resources.engine.requests)  # type: ignore[attr-defined]
    assert asyncio.run(visit(resources, 1, 2)) == found and len(resources.engine.requests) == asked  # type: ignore[attr-defined]
    index = open_index(resources.paths)
    assert index.fresh_rows(policy_version=0, limit=99).num_rows == found
    assert index.select_batch(1, policy_version=0, start_groups=9)[0].num_rows == 0


def test_distil_targets_hold_the_position_the_answers_and_the_teacher_s_odds(resources):
    asyncio.run(visit(resources, 1, 0))
    here = Here()
    made = asyncio.run(label(resources, here, IMPROVE, 1, 0, 5))  # type: ignore[arg-type]
    table = open_distil_targets(distil_target_path(resources.paths, "round-0001", 0)).table
    assert made == table.num_rows == len(here.questions) and 3 <= made <= 5
    shard = shard_path(resources.paths, "visit-round-0001", 0)
    visits = {row["decision_id"]: row for row in open_shard(shard).to_pylist()}
    boards = {
        (phase_row["start_group"], phase_row["fork"], phase_row["phase_index"]): phase_row["snapshot_id"]
        for phase_row in open_phases(shard).to_pylist()
    }
    for distil_target in table.to_pylist():
        row = visits[distil_target["decision_id"]]
        assert distil_target["snapshot_id"] == boards[row["start_group"], row["fork"], row["phase_index"]]
        assert distil_target["prompt_ids"] == row["input_ids"][: row["prompt_len"]] and distil_target[
            "temperature"
        ] == pytest.approx(0.8)
        assert (distil_target["power"], distil_target["phase"]) == (row["power"], row["phase"])
        question = next(each for each in here.questions if each[0].snapshot_id == distil_target["snapshot_id"])
        legal = Board.restore(question[0]).legal_orders()[distil_target["power"]]
        spans = list(pairwise(distil_target["completion_offsets"]))
        read = [resources.tokens.tables.read(distil_target["completion_ids"][begin:end], legal) for begin, end in spans]
        assert ["; ".join(orders) for orders in read] == distil_target["orders"] and all(legal.admits(orders) for orders in read)
        found = search_apart(*question)
        assert tuple(distil_target["values"]) == pytest.approx(found.values) and tuple(distil_target["visits"]) == found.visits
        wanted = teacher_probabilities(found.values, found.visits, found.best, IMPROVE.temperature)
        assert distil_target["probabilities"] == pytest.approx(wanted)


def test_a_second_attempt_at_labels_asks_nobody(resources):
    asyncio.run(visit(resources, 1, 0))
    first = asyncio.run(label(resources, Here(), IMPROVE, 1, 0, 3))  # type: ignore[arg-type]
    assert asyncio.run(label(resources, None, IMPROVE, 1, 0, 3)) == first  # type: ignore[arg-type]
    file = distil_target_path(resources.paths, "round-0001", 0)
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert asyncio.run(label(resources, Here(), IMPROVE, 1, 0, 3)) == first  # type: ignore[arg-type]
    assert file.read_bytes() == whole, "a damaged file is made again, the same"


def test_a_teacher_that_answers_illegally_is_named_and_writes_nothing(resources):
    asyncio.run(visit(resources, 1, 0))

    def illegal(found: SearchResult) -> SearchResult:
        return replace(found, proposals=(*found.proposals[:-1], ("A PAR - MOS",) * len(found.proposals[-1])))

    with pytest.raises((DataError, InputError), match="A PAR - MOS"):
        asyncio.run(label(resources, Here(illegal), IMPROVE, 1, 0, 3))  # type: ignore[arg-type]
    assert not distil_target_path(resources.paths, "round-0001", 0).exists()


@pytest.mark.parametrize(
    ("values", "visits", "best", "temperature", "wanted"),
    [
        ((3.0, 5.0, 4.0), (2, 6, 6), 1, 0.0, (0, 1, 0)),
        ((9.0, 5.0, 4.0), (2, 6, 6), 1, 0.5, (0, 1 / (1 + math.exp(-2)), math.exp(-2) / (1 + math.exp(-2)))),
        ((4.0, 4.0), (3, 3), 0, 0.5, (0.5, 0.5)),
        ((0.0, 900.0), (3, 3), 1, 0.1, (0, 1)),
    ],
    ids=["the best alone", "by equal luck", "ties", "far apart"],
)
def test_the_teacher_s_distribution(values, visits, best, temperature, wanted):
    assert teacher_probabilities(values, visits, best, temperature) == pytest.approx(wanted)


def test_rounds_that_are_done_are_not_repeated_and_one_that_was_begun_keeps_its_settings(tmp_path):
    paths = RunPaths(tmp_path / "mine").create()
    two = IMPROVE.model_copy(update={"rounds": 2})
    assert open_rounds(paths, two) == [1, 2]
    begin_round(paths, 1, two, BASE)
    assert open_rounds(paths, two.model_copy(update={"rounds": 3})) == [1, 2, 3]
    with pytest.raises(InputError, match="round 1 of run 'mine' started with positions 5: keep these settings"):
        open_rounds(paths, two.model_copy(update={"positions": 6}))
    end_round(paths, 1, {"round": 1})
    assert open_rounds(paths, two.model_copy(update={"positions": 6})) == [2]


def test_a_round_is_labelled_for_the_student_that_it_began_with(tmp_path):
    paths = RunPaths(tmp_path / "mine").create()
    begin_round(paths, 1, IMPROVE, BASE)
    check_student(paths, 1, BASE)
    with pytest.raises(InputError, match=r"started labelling for version 0 \(base\), and the run now has version 3"):
        check_student(paths, 1, PolicyVersion(version=3, adapter_hash="ab"))


@pytest.mark.parametrize(
    ("improve", "change", "why"),
    [
        (ImproveSettings(search=SearchSettings(player=("policy",))), {}, "no scripted player 'policy'"),
        (ImproveSettings(search=SearchSettings(scripted=("nobody",))), {}, "nobody"),
        (IMPROVE, {"prompts": {"thinking_tokens": 8}}, "answers without thoughts"),
    ],
    ids=["policy plays", "unknown player", "thoughts"],
)
def test_a_teacher_that_cannot_teach_is_refused_with_a_sentence(improve, change, why):
    with pytest.raises(InputError, match=why):
        check_improve(improve, RunSettings.model_validate(change).prompts.thinking_tokens)


@pytest.mark.parametrize(
    ("error", "again"),
    [(InputError("it is no legal set"), False), (DataError("not legal there"), False), (EngineError("a process ended"), True)],
    ids=["illegal proposal", "illegal distillation target", "lost process"],
)
def test_a_teacher_that_answers_illegally_is_asked_once(error: Exception, again: bool):
    ask: Any = label_visits.retry_condition_fn
    assert label_visits.retries > 0 and ask(label_visits, None, Failed(data=error)) is again
