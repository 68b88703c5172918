"""`entente runs inspect` shows a decision and a group, and refuses what is not there in a sentence."""

from collections.abc import Callable

import pytest

from entente.cli import main
from storage.ledger import read_ledger


@pytest.fixture
def inspect(trained, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command in this process: `inspect("step", 1)`; its exit code."""
    monkeypatch.setattr("entente.prefect_server.environment.prepare_environment", lambda **how: None)

    def run(*words: object, run: str = "first") -> int:
        return main.run(["runs", "inspect", *map(str, words), "--run", run, "--runs-root", str(trained[1].root.parent)])

    return run


@pytest.fixture
def used(trained) -> dict:
    """A row that step 1 trained on."""
    ledger = read_ledger(trained[1], 1)
    assert ledger is not None
    return ledger.to_pylist()[0]


def test_a_decision_is_shown_with_its_tokens_and_its_board_is_drawn(inspect, used, capsys, tmp_path):
    assert inspect("decision", used["decision_id"], "--board", tmp_path / "board.svg") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{used['power']} in {used['phase']}, fork {used['fork']} of start group {used['start_group']}")
    assert "ORDERS:" in said and "legal tokens" in said and "forced" in said and "trained on in step 1" in said
    assert (tmp_path / "board.svg").read_text().startswith("<svg")


def test_the_best_and_the_worst_fork_stand_side_by_side(inspect, used, capsys):
    assert inspect("group", used["start_group"]) == 0
    assert any("best: fork" in line and "worst: fork" in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(("decision", 5), "run 'first' has no decision 5", id="decision"),
        pytest.param(("group", 999), "run 'first' has no group with start_group 999", id="group"),
    ],
)
def test_what_is_not_there_is_one_sentence_and_exit_code_2(inspect, capsys, words: tuple, sentence: str):
    assert inspect(*words) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and sentence in said.err
