"""A checkpoint gives everything back bit for bit, runs no code, is passed over when damaged, and knows its settings."""

import json
import os
import random
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from entente.telemetry.errors import DataError
from entente.training.checkpoint import Checkpoint, StateCopy, load_checkpoint, save_checkpoint
from entente.training.policy import Policy
from entente.training.settings import TrainingSettings, settings_hash
from entente.training.trainer import Trainer
from entente.training.update import Updater
from storage.json_files import sealed
from storage.runs import RunPaths
from storage.settings import StorageSettings
from tests.training.test_packed_forward import base

SETTINGS = TrainingSettings(learning_rate=1e-2, lora_rank=2, lora_alpha=4, device="cpu")


def learner() -> tuple[Policy, torch.optim.Optimizer]:
    policy = Policy(base(), SETTINGS)
    return policy, Updater(policy, SETTINGS).optimiser


def samples() -> list[object]:
    return [torch.rand(3).tolist(), np.random.random(3).tolist(), np.random.normal(), random.random(), random.gauss(0, 1)]


def learn(policy: Policy, optimiser: torch.optim.Optimizer) -> None:
    for parameter in policy.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimiser.step()


def state_of(step: int) -> Checkpoint:
    return Checkpoint(step=step, settings_hash=settings_hash(SETTINGS), metrics={"train/loss": 0.1 + 0.2})


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run with checkpoints of steps 1 and 2; tests copy it."""
    paths = RunPaths(tmp_path_factory.mktemp("two") / "run").create()
    policy, optimiser = learner()
    for step in (1, 2):
        learn(policy, optimiser)
        save_checkpoint(paths, state_of(step), StateCopy.of(policy, optimiser), keep=5)
    return paths


@pytest.fixture
def paths(two: RunPaths, tmp_path: Path) -> RunPaths:
    shutil.copytree(two.root, tmp_path / "run")
    return RunPaths(tmp_path / "run")


def test_all_that_the_next_step_rests_on_comes_back_bit_for_bit(tmp_path: Path):
    paths = RunPaths(tmp_path).create()
    policy, optimiser = learner()
    learn(policy, optimiser)
    random.gauss(0, 1)  # which draws a second one ahead, as numpy's does
    np.random.normal()
    save_checkpoint(paths, state_of(1), StateCopy.of(policy, optimiser), keep=1)
    expected = samples()
    learn(policy, optimiser)
    again, its_optimiser = learner()
    assert load_checkpoint(paths, 1, again, its_optimiser) == state_of(1)
    assert samples() == expected
    learn(again, its_optimiser)
    assert all(one.equal(other) for one, other in zip(policy.parameters(), again.parameters(), strict=True))
    one, other = optimiser.state_dict(), its_optimiser.state_dict()
    assert one["param_groups"] == other["param_groups"] and one["state"].keys() == other["state"].keys()
    assert all(value.equal(other["state"][key][name]) for key, state in one["state"].items() for name, value in state.items())


def test_no_file_of_a_checkpoint_is_a_pickle(paths: RunPaths):
    names = {file.name for file in paths.checkpoint(2).iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "manifest.json", "trainer.safetensors"}


def test_every_changed_digit_of_a_manifest_is_noticed(paths: RunPaths):
    file = paths.checkpoint(2) / "manifest.json"
    text, found = file.read_text(), learner()
    digits = [place for place, character in enumerate(text) if character.isdigit()]
    for place in digits[:: max(1, len(digits) // 150)]:
        changed = f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}"
        if json.loads(changed) == json.loads(text):
            continue  # the last digit of a number whose float is the same
        file.write_text(changed)
        with pytest.raises(DataError):
            load_checkpoint(paths, 2, *found)


def rewritten(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """A manifest that somebody changed, with a checksum that fits."""

    def damage(file: Path) -> None:
        record = json.loads(file.read_text())
        del record["checksum"]
        change(record)
        file.write_text(sealed(record))

    return damage


def in_its_place(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda file: (file.unlink(), make(file))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "step": lambda file: file.write_text(file.read_text().replace('"step": 2', '"step": 3')),
    "step, with its checksum": rewritten(lambda record: record.update(step=3)),
    "files as text": rewritten(lambda record: record.update(files="all")),
    "cut": lambda file: file.write_text(file.read_text()[:-40]),
    "nested": lambda file: file.write_text("[" * 200_000),
    "pipe": in_its_place(os.mkfifo),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_manifest_costs_one_checkpoint_and_not_the_run(paths: RunPaths, damage: Callable[[Path], object]):
    damage(paths.checkpoint(2) / "manifest.json")
    (paths.checkpoints / "step_of_mine").mkdir()  # which is no checkpoint
    trainer = Trainer(paths, Policy(base(), SETTINGS), SETTINGS, StorageSettings())
    assert trainer.step_done == 1 and len(trainer.set_aside) == 1
    assert not paths.checkpoint(2).exists() and len(list(paths.checkpoints.glob(".step_000002.damaged-*"))) == 1


def test_equal_steps_leave_equal_checkpoints_whatever_the_process_drew_before(tmp_path: Path):
    written = []
    for name in ("one", "two"):
        samples()
        paths = RunPaths(tmp_path / name).create()
        folder = save_checkpoint(paths, state_of(1), StateCopy.of(*learner()), keep=1)
        written.append({file.name: sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()})
    assert written[0] == written[1]


def test_weights_that_do_not_fit_change_nothing(paths: RunPaths):
    wider = SETTINGS.model_copy(update={"lora_rank": 3})
    policy = Policy(base(), wider)
    optimiser, sampled = Updater(policy, wider).optimiser, torch.get_rng_state()
    before = [weight.clone() for weight in policy.parameters()]
    with pytest.raises(DataError, match="does not fit this trainer"):
        load_checkpoint(paths, 2, policy, optimiser)
    assert all(one.equal(other) for one, other in zip(before, policy.parameters(), strict=True))
    assert torch.get_rng_state().equal(sampled) and not optimiser.state_dict()["state"]


def test_an_adapter_is_the_same_whatever_folder_its_base_lies_in_and_peft_loads_it(tmp_path: Path):
    from peft import PeftModel

    base().save_pretrained(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "elsewhere" / "two")
    written = []
    for folder in (tmp_path / "one", tmp_path / "elsewhere" / "two"):
        policy = Policy(folder, SETTINGS)
        policy.save_adapter(tmp_path / f"adapter-{folder.name}")
        written.append((tmp_path / f"adapter-{folder.name}" / "adapter_config.json").read_bytes())
    assert written[0] == written[1] and str(tmp_path).encode() not in written[0]
    loaded = PeftModel.from_pretrained(base(), str(tmp_path / "adapter-one"))
    assert vars(loaded.peft_config["default"])["r"] == SETTINGS.lora_rank


@pytest.mark.parametrize(
    "change",
    [{"loss": "gspo"}, {"kl_weight": 0.1}, {"importance_cap": 2.0}, {"advantage_scale": "batch"}, {"clip_low": 0.1}],
    ids=lambda change: next(iter(change)),
)
def test_what_enters_the_weights_changes_the_hash(change: dict):
    assert settings_hash(TrainingSettings(**change)) != settings_hash(TrainingSettings())


def test_what_a_resumed_run_may_change_does_not():
    assert settings_hash(TrainingSettings(threads=3, token_budget=512)) == settings_hash(TrainingSettings())
