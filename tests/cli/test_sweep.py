"""`entente sweep` as a user types it; once with two real runs."""

import json
import subprocess
from typing import Any

import pytest

from storage.runs import RunPaths
from tests.command import Entente

SWEEP = """
name = "two"
config = ["small.toml"]
seeds = [5, 13]
[settings]
"training.learning_rate" = [3e-3]
"""


def test_a_dry_run_shows_runs_and_what_they_share_and_writes_nothing(entente):
    (entente.folder / "sweep.toml").write_text('name = "a"\nseeds = [0, 1]\n[settings]\n"cache.seed" = [0, 1]')
    planned = entente("sweep", "sweep.toml", "--dry-run", "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert plan["runs"]["a-3"] == "seed 0, cache.seed 1" and plan["work"]["runs"] == 4
    assert plan["shared by the runs"] == {"state caches": 2, "base models": 1, "base-model scores": 2}
    assert not (entente.folder / "runs").exists()


def test_a_dry_run_refuses_what_the_sweep_would(entente):
    (entente.folder / "sweep.toml").write_text('name = "a"\nseeds = [0]\n[settings]\ninference.model = ["tiny", "./gone"]')
    planned = entente("sweep", "sweep.toml", "--dry-run")
    assert planned.returncode == 2 and "./gone" in planned.stderr
    (entente.folder / "sweep.toml").write_text('name = "a"\nseeds = [0]\n[settings]\nsteps = [1]')
    (taken := entente.folder / "runs" / "a-1").mkdir(parents=True)
    (taken / "settings.json").write_text("{}")
    planned = entente("sweep", "sweep.toml", "--dry-run")
    assert planned.returncode == 2 and "run 'a-1' exists already in runs" in planned.stderr


@pytest.fixture(scope="module")
def swept(workplace: Entente, trained: Any) -> tuple[list[RunPaths], subprocess.CompletedProcess[str]]:
    """The two runs and what was said; the second has the settings of the run `first`, which was trained alone."""
    (workplace.folder / "two.toml").write_text(SWEEP)
    done = workplace.process("sweep", "two.toml", "--json")
    assert done.returncode == 0, done.stderr
    return [RunPaths(workplace.folder / "runs" / f"two-{number}") for number in (1, 2)], done


@pytest.mark.system
@pytest.mark.in_turn
def test_runs_share_the_base_s_score_and_are_what_they_are_alone(swept, trained):
    (_, alone, _), (runs, done) = trained, swept
    assert done.stderr.count("evaluating base against") == 1, "the base is measured once"
    for version in (1, 2):
        weights = [paths.adapter(version) / "adapter_model.safetensors" for paths in (alone, *runs)]
        assert weights[2].read_bytes() == weights[0].read_bytes() != weights[1].read_bytes()
    found = json.loads(done.stdout.splitlines()[-1])["settings"][0]
    assert found["score"]["seeds"] == 2 and found["score"]["interval"] is None
    scores = [json.loads((paths.scores / "trained.json").read_text())["score"]["mean"] for paths in runs]
    assert found["score"]["mean"] == pytest.approx(sum(scores) / 2, abs=1e-3)
    assert json.loads((alone.scores / "trained.json").read_text())["score"]["mean"] == scores[1]


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on_with_the_run_that_is_left(swept, workplace):
    """What is left, tests/flows/test_sweep.py says; how a run goes on, tests/flows/test_resume.py."""
    runs, done = swept
    (runs[1].root / "summary.json").unlink()  # as a kill leaves it
    again = workplace.process("sweep", "two.toml", "--resume", "--json")
    assert again.returncode == 0, again.stderr
    assert "run two-2: seed 13" in again.stderr and "two-1" not in again.stderr
    assert again.stdout.partition('{"sweep"')[0] == done.stdout.partition('{"sweep"')[0]
