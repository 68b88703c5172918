"""`entente runs replay-step`: a real run's steps are repeated, and the exit code says whether they agree."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from entente.cli import main
from storage.adapters import read_adapter
from storage.files import file_lock
from storage.update_log import update_log_path


@pytest.fixture
def replay(trained, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command in this process, which saves the imports: `replay(run="first", step=2)`; its exit code."""
    monkeypatch.setattr("entente.prefect_server.environment.prepare_environment", lambda **how: None)
    root = trained[1].root.parent

    def run(*more: str, run: str = "first", step: object = 2, runs_root: Path = root) -> int:
        return main.run(["runs", "replay-step", "--run", run, "--step", str(step), "--runs-root", str(runs_root), *more])

    return run


def test_both_steps_of_a_run_made_by_another_process_come_out_again_bitwise(trained, workplace):
    """As a user has it; and the run is at work as far as its locks can tell."""
    _, paths, _ = trained
    lines = {line["step"]: line for line in map(json.loads, paths.metrics.read_text().splitlines())}
    with file_lock(paths.lock), file_lock(paths.trainer_lock):
        done = workplace("runs", "replay-step", "--run", "first", "--step", "2")
    assert done.returncode == 0, done.stderr
    about, loss, norm, adapter, verdict = done.stdout.splitlines()
    assert about == "step 2, replayed from the checkpoint of step 1" and verdict.startswith("all agree bitwise")
    figures = lines[2].get("train/loss", 0.0), lines[2].get("train/grad_norm", 0.0), read_adapter(paths, 2).adapter_hash
    for line, figure in zip((loss, norm, adapter), figures, strict=True):
        assert line.endswith(f"{figure} recorded, {figure} now")
    assert done.stderr.splitlines()[0] == "replaying step 2 from the checkpoint of step 1"


def test_the_first_step_is_replayed_from_the_first_weights(replay, capsys):
    assert replay(step=1) == 0
    assert "step 1, replayed from the first weights" in capsys.readouterr().out


def test_a_difference_is_one_sentence_and_exit_code_1(copied, replay, capsys):
    outcome = update_log_path(copied, 2)
    stored = json.loads(outcome.read_bytes())
    stored["updates"][-1]["micro_batches"][0] += 1e-6
    outcome.write_text(json.dumps(stored))
    assert replay(run="copy", runs_root=copied.root.parent) == 1
    said = capsys.readouterr()
    last = said.err.splitlines()[-1]
    assert last.startswith(
        f"entente: micro-batch 1 of update {len(stored['updates'])} of step 2 differs: the loss was recorded as "
    )


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        pytest.param({"run": "none"}, "there is no run in '", id="no run"),
        pytest.param({"step": 3}, "step 3 does not exist: run 'first' has steps 1 to 2", id="step that never was"),
    ],
)
def test_what_cannot_be_asked_for_is_one_sentence_and_exit_code_2(replay, capsys, how: dict, sentence: str):
    assert replay(**how) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and said.err.startswith("entente: ") and sentence in said.err
