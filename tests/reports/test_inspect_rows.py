"""What is shown of a decision, a group or a step is what the run's files hold."""

import math

import numpy as np
import pytest

from entente.reports.inspect_rows import Inspector
from entente.settings.layers import settings_of
from storage.ledger import ledger_path, read_ledger
from storage.runs import MODEL_FOLDER, RunPaths
from tests.shard_rows import read_rows, shard_files


@pytest.fixture(scope="module")
def paths(trained) -> RunPaths:
    return trained[1]


@pytest.fixture(scope="module")
def rows(paths: RunPaths) -> Inspector:
    (model,) = (paths.root.parent / MODEL_FOLDER).glob("tiny-*")
    return Inspector(paths, model, settings_of(paths))


@pytest.fixture(scope="module")
def stored(paths: RunPaths) -> list[dict]:
    """All rows, as the shards hold them."""
    return read_rows(*shard_files(paths))


def test_a_decision_is_shown_as_it_was_drawn(rows, stored):
    for row in stored[:: max(1, len(stored) // 8)]:
        shown = rows.decision(row["decision_id"])
        assert [sampled.legal for sampled in shown.sampled] == np.diff(row["legal_offsets"]).tolist()
        assert [sampled.logprob for sampled in shown.sampled] == row["behaviour_logprobs"]
        assert "".join(sampled.token for sampled in shown.sampled) == shown.answer
        assert [order for order, _ in shown.orders] == row["orders"]
        assert shown.answer.removesuffix("<|end|>").split("\n") == row["orders"]
        together = math.prod(probability for _, probability in shown.orders)
        assert math.log(together) == pytest.approx(sum(row["behaviour_logprobs"]), abs=1e-5)


def test_the_board_is_the_position_of_the_prompt_and_its_picture_has_the_orders(rows, stored):
    for row in (stored[0], stored[-1]):
        shown = rows.decision(row["decision_id"])
        assert shown.board is not None and shown.board.phase == row["phase"]
        line = next(line for line in shown.prompt.splitlines() if line.startswith(f"{row['power']} ") and " | " in line)
        units = shown.board.units()[row["power"]]
        assert sorted(units) == sorted(unit for unit in units if unit in line) and units
        assert shown.picture().startswith("<svg") and shown.picture() != shown.picture(whole=True)
        assert set(shown.results) <= {" ".join(order.split()[:2]) for order in row["orders"]}


def test_a_decision_tells_the_steps_that_trained_on_it(rows, paths, run_folder: RunPaths):
    ids = {}
    for step in (1, 2):
        ledger = read_ledger(paths, step)
        assert ledger is not None
        ids[step] = ledger["decision_id"].to_pylist()[:3]
        assert len(ids[step]) == 3 and all(rows.decision(row).steps == [step] for row in ids[step])
    last = ledger_path(run_folder, 2).rename(run_folder.root / "last.arrow")
    (model,) = (paths.root.parent / MODEL_FOLDER).glob("tiny-*")
    before = Inspector(run_folder, model, settings_of(run_folder))
    assert [before.decision(row).steps for row in ids[1] + ids[2]] == 3 * [[1]] + 3 * [[]], "nothing trained on the later ones"
    last.rename(ledger_path(run_folder, 2))
    assert before.decision(ids[2][0]).steps == [2], "a step trained on it since its shard was opened"


def test_the_best_and_the_worst_fork_of_a_group_are_those_of_the_returns(rows, paths):
    ledger = read_ledger(paths, 2)
    assert ledger is not None and ledger.num_rows
    first = ledger.to_pylist()[0]
    shown = rows.group(first["start_group"], first["power"].lower(), first["phase"])
    returns = {
        row["fork"]: row["return"]
        for row in ledger.to_pylist()
        if (row["start_group"], row["power"], row["phase"]) == (first["start_group"], first["power"], first["phase"])
    }
    assert {member["fork"]: member["return"] for member in shown.members} == returns
    assert shown.best.facts["return"] == max(returns.values()) > shown.worst.facts["return"] == min(returns.values())
    assert rows.group(first["start_group"], None, None).facts["return_range"] >= shown.facts["return_range"]


def test_an_advantage_is_the_return_less_the_mean_of_the_other_forks(rows, paths):
    ledger = read_ledger(paths, 2)
    assert ledger is not None
    first = ledger.to_pylist()[0]
    members = rows.group(first["start_group"], first["power"], first["phase"]).members
    assert len(members) > 2
    for member in members:
        others = [other["return"] for other in members if other is not member]
        assert member["advantage"] == pytest.approx(member["return"] - sum(others) / len(others), abs=1e-6)
        shown = rows.decision(member["decision_id"], member["shard"])
        assert shown.advantage == member["advantage"] and shown.used[0][0] == 2
    course = rows.course(members[0])
    assert course[0][0] == first["phase"] and len(course[-1][1]) - len(course[0][1]) == sum(
        row["centres_gained"]
        for row in read_rows(paths.shards / first["shard"])
        if (row["start_group"], row["fork"], row["power"]) == (first["start_group"], members[0]["fork"], first["power"])
        and row["phase_index"] >= members[0]["phase_index"]
    )
