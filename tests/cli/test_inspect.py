"""`entente runs inspect` shows a decision and a group, and refuses what is not there in a sentence."""

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from entente.cli.inspect import _opened, _write_board
from entente.inference.settings import InferenceSettings
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from storage.ledger import read_ledger


@pytest.fixture
def used(trained) -> dict:
    """A row that step 1 trained on."""
    ledger = read_ledger(trained[1], 1)
    assert ledger is not None
    return ledger.to_pylist()[0]


def test_a_decision_is_shown_with_its_tokens_and_its_board_is_drawn(workplace, used, tmp_path):
    board = tmp_path / "board.svg"
    done = workplace("runs", "inspect", "decision", str(used["decision_id"]), "--board", str(board), "--run", "first")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{used['power']} in {used['phase']}, fork {used['fork']} of start group {used['start_group']}")
    assert [part for part in ("ORDERS:", "legal tokens", "forced", "trained on in step 1") if part not in done.stdout] == []
    assert board.read_text().startswith("<svg")


def test_the_best_and_the_worst_fork_stand_side_by_side(workplace, used):
    done = workplace("runs", "inspect", "group", str(used["start_group"]), "--run", "first")
    assert done.returncode == 0, done.stderr
    assert any("best: fork" in line and "worst: fork" in line for line in done.stdout.splitlines())
    assert done.stdout.splitlines()[1].endswith("trained on by 1 step")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(("decision", "5"), "run 'first' has no decision 5", id="decision"),
        pytest.param(("group", "999"), "run 'first' has no group with start_group 999", id="group"),
    ],
)
def test_what_is_not_there_is_one_sentence_and_exit_code_2(workplace, trained, words: tuple[str, ...], sentence: str):
    done = workplace("runs", "inspect", *words, "--run", "first")
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1 and sentence in done.stderr


def test_the_text_of_tokens_is_not_that_of_another_base_which_took_the_folder_s_place(tmp_path: Path):
    settings = RunSettings(run="mine", inference=InferenceSettings(model=str(Path("models/whole-192").resolve())))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "settings.json").write_text(settings.model_dump_json())
    (tmp_path / "mine" / "base.json").write_text('{"tokenizer.json": "0123"}')
    with pytest.raises(InputError, match="the base model of run 'mine' was replaced"):
        _opened("mine", tmp_path)


def test_a_picture_that_cannot_be_written_whole_leaves_the_one_before(tmp_path: Path):
    board, decided = tmp_path / "board.svg", SimpleNamespace(picture=lambda: "<svg>" * 1000)
    board.write_text("<svg/>")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(InputError, match="cannot be written"):
            _write_board(decided, board)  # type: ignore[arg-type]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert board.read_text() == "<svg/>" and [*tmp_path.iterdir()] == [board]
