"""The figures of `bench e2e` are of settled steps."""

import json
import os
from pathlib import Path

import pytest

from benchmarks.entente_run import RunFigures, _lags, figures, train_command
from entente.cli.main import run
from storage.ledger import ledgers_after
from storage.runs import RunPaths


def test_the_first_step_does_not_count():
    step = {
        "time/step_s": 2.0, "time/train_s": 1.0, "time/orchestration_s": 0.1, "train/decisions": 100.0,
        "rollout/decisions": 150.0, "rollout/start_groups": 8.0,
    }  # fmt: skip
    whole = RunFigures(steps=[{"time/step_s": 90.0}, step, step], cpu_s=[50.0, 53.0, 56.0], summary={}, lags=[0, 1, 1, 2])
    assert figures(whole) == pytest.approx(
        {
            "steps_per_hour": 1800.0,
            "cpu_s_a_step": 3.0,
            "decisions_per_s": 75.0,
            "trained_a_step": 100.0,
            "trainer_idle_share": 0.5,
            "orchestration_share": 0.05,
            "policy_lag_max": 2.0,
        }
    )


def test_the_lags_are_those_of_the_run_s_ledgers(stored_run: RunPaths):
    rows = sum(ledger.num_rows for ledger in ledgers_after(stored_run, 0))
    assert len(_lags(stored_run)) == rows > 0


@pytest.mark.parametrize(
    ("words", "sentence"), [(("--rounds", "0"), "Must be >= 1"), (("--steps", "2"), "measure nothing")], ids=["rounds", "steps"]
)
def test_nothing_to_measure_is_refused_before_anything_is_made(
    words: tuple[str, str], sentence: str, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("entente.prefect_server.environment.prepare_environment", lambda **how: None)
    assert run(["bench", "e2e", *words]) == 2 and sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_measured_adds_only_the_clone_to_the_path_that_its_server_inherits(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["mine", "/elsewhere"]))
    paths = train_command([], tmp_path, "some", alone=True)[1]["PYTHONPATH"].split(os.pathsep)
    assert paths == [str(Path(__file__).parents[2]), str(tmp_path / "mine"), "/elsewhere"]


@pytest.mark.slow
def test_whole_steps_are_measured(workplace):
    done = workplace.process("bench", "e2e", "--rounds", "1", "--steps", "3", "--config", "small.toml", "--json")
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout.splitlines()[-1])["metrics"]
    assert metrics["steps_per_hour"] > 0 and 0 <= metrics["orchestration_share"] < 1 and metrics["policy_lag_max"] == 0
