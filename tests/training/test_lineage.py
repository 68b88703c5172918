"""A run goes on under other settings in a lineage of its own, from the checkpoint where it stood, and nowhere else."""

import shutil
from pathlib import Path

import pytest

from storage.ledger import read_ledger, recorded_steps, write_ledger
from storage.lineages import current_lineage, read_lineage
from storage.runs import RunPaths
from storage.settings import StorageSettings
from telemetry.errors import DataError, InputError
from training.lineage import Fork
from training.policy import Policy
from training.settings import TrainingSettings
from training.trainer import Trainer

SETTINGS = TrainingSettings(learning_rate=1e-2, lora_rank=8, lora_alpha=16)
HOT = SETTINGS.model_copy(update={"learning_rate": 3e-2})


@pytest.fixture(scope="module")
def two_steps(exact_run, model, tmp_path_factory) -> RunPaths:
    """A run with rows of six start groups and two steps behind it; tests copy it."""
    paths = exact_run(tmp_path_factory.mktemp("forked") / "run", groups=6, forks=4)
    trainer = trainer_for(paths, model)
    for step in (1, 2):
        trainer.step(step, 1)
    return paths


@pytest.fixture
def paths(two_steps: RunPaths, tmp_path: Path) -> RunPaths:
    shutil.copytree(two_steps.root, tmp_path / "copy")
    return RunPaths(tmp_path / "copy")


def trainer_for(paths: RunPaths, model: Path, settings=SETTINGS, storage=None, fork: str = "") -> Trainer:
    wish = Fork(name=fork) if fork else None
    return Trainer(paths, Policy(model, settings), settings, storage or StorageSettings(), fork=wish)


def used(paths: RunPaths, lineage: str) -> list[int]:
    return [
        row for step in recorded_steps(paths, lineage) for row in read_ledger(paths, lineage, step)["decision_id"].to_pylist()
    ]


def test_other_settings_go_on_in_a_fork_which_uses_nothing_that_was_used_before_it(paths, model):
    trainer = trainer_for(paths, model, HOT, fork="hot")
    assert (trainer.lineage, trainer.step_done) == ("hot", 2)
    trainer.step(3, 2)
    fork = read_lineage(paths, "hot")
    assert fork is not None and (fork.parent, fork.after_step) == ("main", 2)
    assert (recorded_steps(paths, "main"), recorded_steps(paths, "hot")) == ([1, 2], [3])
    assert used(paths, "hot") and not set(used(paths, "main")) & set(used(paths, "hot"))
    resumed = trainer_for(paths, model, HOT)
    assert (resumed.lineage, resumed.step_done) == ("hot", 3), "which needs no name from then on"
    with pytest.raises(InputError, match=r"other training settings.*--fork-lineage"):
        trainer_for(paths, model)


def test_a_fork_that_was_killed_before_its_first_step_goes_on_as_one_and_under_its_own_settings_alone(paths, model):
    trainer_for(paths, model, HOT, fork="hot")
    for settings, storage in ((SETTINGS, None), (HOT, StorageSettings(discount=0.5))):
        with pytest.raises(InputError, match=r"lineage 'hot'.*opened for other settings"):
            trainer_for(paths, model, settings, storage)
    again = trainer_for(paths, model, HOT)
    assert (again.lineage, again.step_done) == ("hot", 2)
    again.step(3, 1)
    assert recorded_steps(paths, "hot") == [3]


def test_rows_that_the_parent_recorded_beyond_its_newest_checkpoint_are_free_in_the_fork(paths, model):
    """A kill came between its ledger and its checkpoint."""
    trainer = trainer_for(paths, model)
    choice = trainer._choose(3, 9)
    assert write_ledger(paths, "main", 3, choice.selection.rows, {})
    forked = trainer_for(paths, model, HOT, fork="hot")
    forked.step(3, 9)
    assert sorted(used(paths, "hot")) == sorted(choice.selection.rows["decision_id"].to_pylist()) != []


def test_a_fork_begins_at_the_newest_version_or_not_at_all(paths, model):
    shutil.rmtree(paths.checkpoint(2))
    with pytest.raises(InputError, match="published version 2, but its newest whole checkpoint is of step 1"):
        trainer_for(paths, model, HOT, fork="hot")
    assert current_lineage(paths) == "main"
    trainer_for(paths, model).step(2, 1)
    assert trainer_for(paths, model, HOT, fork="hot").lineage == "hot"


def test_a_fork_whose_first_checkpoint_is_gone_does_not_go_on_from_an_older_one(paths, model):
    trainer_for(paths, model, HOT, fork="hot")
    shutil.rmtree(paths.checkpoint(2))
    with pytest.raises(DataError, match=r"lineage 'hot'.*goes on from step 2 of lineage 'main', whose checkpoint is gone"):
        trainer_for(paths, model, HOT)


def test_a_run_without_a_checkpoint_forks_at_its_beginning(two_steps, model, tmp_path):
    paths = RunPaths(tmp_path / "fresh").create()
    shutil.copytree(two_steps.shards, paths.shards, dirs_exist_ok=True)
    assert trainer_for(paths, model, HOT, fork="hot").lineage == "hot"
    trainer = trainer_for(paths, model, HOT)
    assert (trainer.lineage, trainer.step_done) == ("hot", 0)
