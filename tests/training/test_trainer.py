"""The trainer learns what it should, refuses what it must, and repeats itself bitwise."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.padded_rows import padded_logprobs
from entente.players.policy import PolicyPlayer
from entente.telemetry.errors import DataError, InputError, TrainingError
from entente.training import trainer as trainer_module
from entente.training.advantages import leave_one_out
from entente.training.policy import Policy
from entente.training.settings import TrainingSettings
from entente.training.trainer import Trainer
from entente.training.update import Updater
from storage.adapters import read_adapter
from storage.index import Index, open_index
from storage.json_files import read_object, sealed
from storage.ledger import ledger_path, read_ledger, recorded_steps, restore_ledgers, write_ledger
from storage.runs import CHECKPOINT_MANIFEST, RunPaths, checkpoint_steps
from storage.settings import StorageSettings
from tests.damage import flip
from tests.training.whole_step import whole_step

SETTINGS = TrainingSettings(learning_rate=1e-2, lora_rank=8, lora_alpha=16)


def trainer_for(paths: RunPaths, model: Path, settings: TrainingSettings = SETTINGS) -> Trainer:
    return Trainer(paths, Policy(model, settings), settings, StorageSettings())


def whole_batch(paths: RunPaths):
    index = open_index(paths)
    return index.gather(index.fresh_rows(policy_version=0, limit=10_000))


def chosen_logprobs(policy: Policy, batch) -> np.ndarray:
    """Sum over branching tokens of each row's masked logprobs."""
    sums, row_of = (
        np.zeros(len(batch.prompt_lens)),
        np.repeat(np.arange(len(batch.prompt_lens)), np.diff(batch.completion_offsets)),
    )
    with torch.no_grad():
        for index, logprobs in padded_logprobs(policy, batch, range(len(batch.prompt_lens))):
            np.add.at(sums, row_of[index], logprobs.numpy())
    return sums


def test_at_lag_zero_trainer_and_sampler_agree(paths, model):
    trainer = trainer_for(paths, model)
    found = trainer.measure_mismatch(begins=True)
    assert found["mismatch/tokens"] > 100 and found["mismatch/largest"] < 1e-4


@pytest.mark.parametrize("lie", [{"temperature": 0.7}, {"forget_mask": True}], ids=["another temperature", "no mask"])
def test_rows_drawn_under_another_mask_or_temperature_stop_the_run(run_with_rows, exact_engine, model, lie):
    trainer = trainer_for(run_with_rows(exact_engine(**lie), groups=1, forks=2), model)
    with pytest.raises(TrainingError, match=r"disagree on version 0.*does not start"):
        trainer.measure_mismatch(begins=True)


def test_a_row_with_one_legal_id_too_few_stops_the_run(run_with_rows, exact_engine, model, monkeypatch):
    """The trainer's legal sets come from the rows: an altered set is another distribution."""
    decide = PolicyPlayer.decide

    async def narrowed(self, *arguments):
        sampled = await decide(self, *arguments)
        ids, offsets = sampled.legal_ids, sampled.legal_offsets
        widest = int(np.argmax(np.diff(offsets)))
        token = sampled.generation.token_ids[widest]
        place = next(at for at in range(offsets[widest], offsets[widest + 1]) if ids[at] != token)
        cut = offsets.copy()
        cut[widest + 1 :] -= 1
        return replace(sampled, legal_ids=np.delete(ids, place), legal_offsets=cut)

    monkeypatch.setattr(PolicyPlayer, "decide", narrowed)
    with pytest.raises(TrainingError, match="disagree"):
        trainer_for(run_with_rows(exact_engine(), groups=1, forks=2), model).measure_mismatch(begins=True)


def test_a_step_makes_better_decisions_likelier_and_worse_ones_rarer(paths, model):
    batch = whole_batch(paths)
    policy = Policy(model, SETTINGS)
    before = chosen_logprobs(policy, batch)
    whole_step(Trainer(paths, policy, SETTINGS, StorageSettings()), 1, 4)
    moved = chosen_logprobs(policy, batch) - before
    ledger = read_ledger(paths, 1)
    assert ledger is not None
    used = dict(zip(ledger["decision_id"].to_pylist(), ledger["return"].to_pylist(), strict=True))
    groups = dict(zip(ledger["decision_id"].to_pylist(), ledger["advantage_group"].to_pylist(), strict=True))
    at = [index for index, decision in enumerate(batch.decision_ids.tolist()) if decision in used]
    returns = np.array([used[batch.decision_ids[index]] for index in at])
    advantages = leave_one_out(returns, np.array([groups[batch.decision_ids[index]] for index in at]))
    assert np.corrcoef(advantages, moved[at])[0, 1] > 0.3


def test_a_faulty_row_is_counted_and_the_step_goes_on_without_its_group(paths, model, monkeypatch):
    honest, seen, faulty = Index.gather, [], []

    def damaged(self, rows):
        batch = honest(self, rows)
        faulty.append(faulty[0] if faulty else int(batch.decision_ids[1]))
        logprobs = batch.behaviour_logprobs.copy()
        logprobs[batch.completion_offsets[:-1][batch.decision_ids == faulty[0]]] = float("nan")
        return replace(batch, behaviour_logprobs=logprobs)

    accumulate = Updater.accumulate
    monkeypatch.setattr(Updater, "accumulate", lambda self, batch, *rest: seen.append(batch) or accumulate(self, batch, *rest))
    monkeypatch.setattr(Index, "gather", damaged)
    metrics = whole_step(trainer_for(paths, model), 1, 4).metrics
    ledger = read_ledger(paths, 1)
    assert ledger is not None and metrics["train/refused_rows"] == 1.0 and metrics["train/skipped"] == 0.0
    groups, decisions = ledger["advantage_group"].to_pylist(), ledger["decision_id"].to_pylist()
    left = {decision for decision, group in zip(decisions, groups, strict=True) if group != groups[1]}
    assert set(seen[0].decision_ids.tolist()) == left and len(left) < len(decisions)
    assert metrics["train/decisions"] == len(left), "the metrics are of the rows trained"


def test_the_ledger_is_written_before_the_forward(paths, model, monkeypatch):
    trainer = trainer_for(paths, model)

    def broken(self: Policy, rows: object, reference: object = None) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(Policy, "masked_logprobs", broken)
    with pytest.raises(RuntimeError, match="power cut"):
        whole_step(trainer, 1, 4)
    assert recorded_steps(paths) == [1] and checkpoint_steps(paths) == []


def test_a_second_trainer_on_the_run_is_fenced_by_the_ledger(paths, model):
    first, second = trainer_for(paths, model), trainer_for(paths, model)
    whole_step(first, 1, 4)
    with pytest.raises(TrainingError, match="another trainer already holds step 1"):
        whole_step(second, 1, 4)


def test_no_decision_is_trained_twice_and_a_step_without_rows_publishes_unchanged_weights(paths, model):
    trainer = trainer_for(paths, model)
    first, second = whole_step(trainer, 1, 4), whole_step(trainer, 2, 4)
    one, two = read_ledger(paths, 1), read_ledger(paths, 2)
    assert one is not None and two is not None
    assert one.num_rows > 10 and not set(one["decision_id"].to_pylist()) & set(two["decision_id"].to_pylist())
    assert two.num_rows == 0 and second.metrics["train/skipped"] == 1.0
    assert second.published.version == 2 and second.published.adapter_hash == first.published.adapter_hash
    assert read_adapter(paths, 2).folder.name == "v000002"


def run_files(paths: RunPaths) -> dict[str, bytes]:
    """What a run's steps left that must last: ledgers and published weights, byte by byte."""
    files = [*paths.ledger.rglob("step-*"), *paths.adapters.rglob("v*/adapter_model.safetensors")]
    return {str(file.relative_to(paths.root)): file.read_bytes() for file in files}


class Killed(BaseException):
    """Stands for the moment of a kill: nothing catches it."""


@pytest.fixture(scope="module")
def undisturbed(played: RunPaths, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunPaths, dict[str, bytes]]:
    """The run as it stands after its first step, and the files of one that nobody killed after its third."""
    folder = tmp_path_factory.mktemp("undisturbed")
    paths = RunPaths(folder / "whole")
    shutil.copytree(played.root, paths.root)
    trainer = trainer_for(paths, model)
    whole_step(trainer, 1, 2)
    shutil.copytree(paths.root, folder / "first")
    whole_step(trainer, 2, 1)
    whole_step(trainer, 3, 1)
    return RunPaths(folder / "first"), run_files(paths)


@pytest.mark.system
@pytest.mark.parametrize(
    ("when", "moment"),
    [
        ("before", "write_ledger"),
        ("before", "save_checkpoint"),
        ("after", "save_checkpoint"),
        ("after", "publish_adapter"),
        ("after", "write_update_log"),
    ],
)
def test_a_step_that_a_kill_cut_anywhere_is_done_once_and_ends_as_if_nothing_had_happened(
    undisturbed, model, tmp_path, monkeypatch, when: str, moment: str
):
    """Between any two of the writes of a step, which come in this order."""
    first, expected = undisturbed
    paths = RunPaths(tmp_path / "killed")
    shutil.copytree(first.root, paths.root)
    honest = getattr(trainer_module, moment)

    def cut(*arguments):
        if when == "after":
            honest(*arguments)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(trainer_module, moment, cut)
        whole_step(trainer_for(paths, model), 2, 1)
    trainer = trainer_for(paths, model)
    if trainer.step_done == 1:
        whole_step(trainer, 2, 1)
    assert trainer.step_done == 2 and trainer.saved() == read_adapter(paths, 2)
    whole_step(trainer, 3, 1)
    used = [row for step in recorded_steps(paths) for row in read_ledger(paths, step)["decision_id"].to_pylist()]
    assert len(used) == len(set(used)) and recorded_steps(paths) == [1, 2, 3]
    assert run_files(paths) == expected


def test_a_step_trains_while_the_one_before_is_written_as_it_was(undisturbed, model, tmp_path, monkeypatch):
    """The writer of step 2 waits until step 3 has changed the weights and the moments."""
    first, expected = undisturbed
    paths = RunPaths(tmp_path / "late")
    shutil.copytree(first.root, paths.root)
    honest, measured, updated, updates = trainer_module.save_checkpoint, trainer_module.update_metrics, Event(), []

    def late(paths: RunPaths, state: Any, *rest: Any) -> Any:
        assert state.step == 3 or updated.wait(120)
        return honest(paths, state, *rest)

    def noted(figures: Any) -> Any:
        updates.append(paths.adapter(2).exists())
        if len(updates) == 2:
            updated.set()
        return measured(figures)

    monkeypatch.setattr(trainer_module, "save_checkpoint", late)
    monkeypatch.setattr(trainer_module, "update_metrics", noted)
    trainer = trainer_for(paths, model)
    trainer.step(2, 1)
    trainer.step(3, 1)
    trainer.saved()
    assert updates == [False, False] and run_files(paths) == expected


def test_a_step_that_cannot_be_written_is_said_and_no_later_one_is_published(undisturbed, model, tmp_path, monkeypatch):
    """A kill then leaves two ledgers without a checkpoint, and both steps are repeated."""
    first, expected = undisturbed
    paths = RunPaths(tmp_path / "killed")
    shutil.copytree(first.root, paths.root)
    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "save_checkpoint", lambda *_: (_ for _ in ()).throw(Killed))
        trainer = trainer_for(paths, model)
        trainer.step(2, 1)
        with pytest.raises(Killed):
            trainer.step(3, 1)
        with pytest.raises(Killed):
            trainer.saved()
    assert recorded_steps(paths) == [1, 2, 3] and not paths.adapter(2).exists()
    trainer = trainer_for(paths, model)
    for step in (2, 3):
        whole_step(trainer, step, 1)
    assert run_files(paths) == expected


def test_a_recorded_step_uses_its_recorded_rows_even_where_a_choice_would_now_be_another(played, model, tmp_path, monkeypatch):
    """Rows that come in after the ledger was written are fresher, and must not enter the repeated step."""
    shutil.copytree(played.root, tmp_path / "run")
    paths = RunPaths(tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(trainer_module, "save_checkpoint", lambda *_: (_ for _ in ()).throw(Killed))
        whole_step(trainer_for(paths, model), 1, 1)
    recorded = read_ledger(paths, 1)
    assert recorded is not None
    trainer = trainer_for(paths, model)
    report = whole_step(trainer, 1, 4)
    assert report.metrics["train/decisions"] == recorded.num_rows < whole_batch(paths).returns.size
    assert read_ledger(paths, 1).equals(recorded)


def test_a_step_of_a_former_release_that_had_distillation_targets_is_not_repeated_without_them(paths, model):
    rows, _ = open_index(paths).select_batch(1, policy_version=0, start_groups=2)
    write_ledger(paths, 1, rows, {"distil_targets": '[["round-0001/000000.arrow", 0, 1, 2]]'})
    with pytest.raises(DataError, match=r"step 1 also trained on distillation targets.*use the release that wrote it"):
        whole_step(trainer_for(paths, model), 1, 2)


def test_a_damaged_checkpoint_is_set_aside_and_its_step_repeated_from_its_ledger(paths, model):
    trainer = trainer_for(paths, model)
    whole_step(trainer, 1, 2)
    whole_step(trainer, 2, 1)
    before = run_files(paths)
    flip(paths.checkpoint(2) / "trainer.safetensors")
    again = trainer_for(paths, model)
    assert again.step_done == 1 and "trainer.safetensors' is missing, truncated or altered" in again.set_aside[0]
    whole_step(again, 2, 1)
    assert run_files(paths) == before
    assert [path.name.split("-")[0] for path in paths.checkpoints.glob(".step*")] == [".step_000002.damaged"]


def test_a_checkpoint_of_another_release_is_refused_if_it_is_whole_and_set_aside_if_not(paths, model):
    whole_step(trainer_for(paths, model), 1, 4)
    manifest = paths.checkpoint(1) / CHECKPOINT_MANIFEST
    record = read_object(manifest)
    manifest.write_text(sealed({name: value for name, value in record.items() if name != "checksum"} | {"format": 99}))
    with pytest.raises(InputError, match=r"has format 99, .*: use the release that wrote it"):
        trainer_for(paths, model)
    manifest.write_text(json.dumps(record | {"format": 99}))
    again = trainer_for(paths, model)
    assert again.step_done == 0 and "its checksum is wrong" in again.set_aside[0]


def test_an_adapter_that_is_damaged_or_gone_is_published_again_from_the_checkpoint(paths, model):
    before = whole_step(trainer_for(paths, model), 1, 4).published
    flip(before.folder / "adapter_model.safetensors")
    assert trainer_for(paths, model).saved() == before == read_adapter(paths, 1)
    shutil.rmtree(before.folder)
    assert trainer_for(paths, model).saved() == before == read_adapter(paths, 1)


def test_a_run_does_not_go_on_under_other_training_settings_but_may_have_other_threads(paths, model):
    whole_step(trainer_for(paths, model), 1, 4)
    with pytest.raises(InputError, match="made under other training settings"):
        trainer_for(paths, model, SETTINGS.model_copy(update={"learning_rate": 2e-2}))
    assert trainer_for(paths, model, SETTINGS.model_copy(update={"threads": 1})).step_done == 1


def test_a_step_chooses_again_where_a_chosen_shard_is_damaged_and_the_run_goes_on(paths, model, tmp_path):
    """One bit, flipped below the mapping after the shard was taken in."""
    from entente.records.rows import Decision, PlayedPhase
    from storage.shards import open_phases, open_shard, publish_shard

    source, split = paths.shards / "local" / "000000.arrow", RunPaths(tmp_path / "split").create()
    decisions, phases = open_shard(source).to_pylist(), open_phases(source).to_pylist()
    for first in (0, 2):
        mine = range(first, first + 2)
        publish_shard(
            split,
            "local",
            first,
            [Decision(**row) for row in decisions if row["start_group"] in mine],
            [PlayedPhase(**row) for row in phases if row["start_group"] in mine],
            {},
            next_start_group=first + 2,
        )
    trainer = trainer_for(split, model)
    assert trainer.eligible(1, 4).start_groups > 2, "of both shards"
    damaged = split.shards / "local" / "000002.arrow"
    content = damaged.read_bytes()
    with damaged.open("r+b", buffering=0) as file:
        file.seek(content.index(np.asarray(open_shard(damaged)["input_ids"].chunk(0).values).tobytes()) + 4)
        file.write(bytes([content[file.tell()] ^ 1]))
    report = whole_step(trainer, 1, 4)
    ledger = read_ledger(split, 1)
    assert ledger is not None and set(ledger["shard"].to_pylist()) == {"local/000000.arrow"}
    assert report.metrics["train/refused_shards"] == 1
    whole_step(trainer, 2, 4)
    assert recorded_steps(split) == [1, 2]


def test_a_checkpoint_has_the_ledgers_whose_rows_may_be_drawn_again(paths, model):
    whole_step(trainer_for(paths, model), 1, 2)
    trained = ledger_path(paths, 1)
    before = trained.read_bytes()
    trained.unlink()
    assert len(restore_ledgers(paths, StorageSettings())) == 1 and trained.read_bytes() == before
    assert trainer_for(paths, model).resume_point().published.version == 1
