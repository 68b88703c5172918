"""Training on distillation targets: the loss against plain loops, its ledger before its forward, and steps repeated bitwise."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from entente.telemetry.errors import DataError
from entente.training.advantages import leave_one_out
from entente.training.objective import StepFigures
from entente.training.policy import Policy
from entente.training.replay import replay_step
from entente.training.settings import TrainingSettings
from entente.training.trainer import Trainer
from entente.training.update import Updater
from storage.adapters import read_adapter
from storage.distil_store import DistilBatch, DistilQuery, DistilStore, distil_target_uses
from storage.distil_targets import recorded_distil_targets
from storage.index import open_index
from storage.ledger import read_ledger
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.update_log import read_update_log
from tests.training import taught_run
from tests.training.loss_oracle import masked
from tests.training.whole_step import whole_step

SETTINGS = TrainingSettings(learning_rate=1e-2, lora_rank=4, lora_alpha=8, device="cpu")
QUERY = DistilQuery(round="r", count=4, max_uses=2)


@pytest.fixture(scope="module")
def played(exact_run, tmp_path_factory) -> RunPaths:
    """One run with rows and distillation targets; tests copy it."""
    paths = exact_run(tmp_path_factory.mktemp("played") / "run", groups=4, forks=4)
    assert taught_run.publish(paths, each=3) >= 4
    return paths


@pytest.fixture
def paths(played: RunPaths, tmp_path: Path) -> RunPaths:
    return RunPaths(shutil.copytree(played.root, tmp_path / "copy"))


def distil_targets_of(paths: RunPaths, count: int = 3) -> DistilBatch:
    store = DistilStore(paths, 0)
    return store.gather(store.choose(replace(QUERY, count=count)))


def rows_of(paths: RunPaths):
    index = open_index(paths)
    rows, _ = index.select_batch(1, policy_version=0, start_groups=1)
    return index.gather(rows)


def stirred(model: Path, settings: TrainingSettings) -> Policy:
    policy, rng = Policy(model, settings), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))
    return policy


def looped_loss(policy: Policy, distil_targets: DistilBatch) -> float:
    """The distillation loss: one proposal after another through the model as transformers has it, then plain Python."""
    batch, total, tokens = distil_targets.batch, 0.0, 0.0
    for row, probability in enumerate(distil_targets.weights.tolist()):
        ids = batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]]
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor(ids[None].astype(np.int64))).logits[0].double()
        for number, place in enumerate(range(batch.completion_offsets[row], batch.completion_offsets[row + 1])):
            legal = batch.legal_ids[batch.legal_offsets[place] : batch.legal_offsets[place + 1]].tolist()
            at = int(batch.prompt_lens[row]) + number
            if len(legal) > 1:
                total -= probability * masked(logits[at - 1].tolist(), legal)[int(ids[at])]
                tokens += probability
    return total / tokens


def gradient_of(policy: Policy) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).flatten() for w in policy.parameters()])


def accumulated(policy: Policy, settings: TrainingSettings, paths: RunPaths, *, sampled: bool, taught: bool) -> StepFigures:
    batch, distil_targets = rows_of(paths), distil_targets_of(paths) if taught else None
    advantages = leave_one_out(batch.returns, batch.advantage_groups).astype(np.float32)
    rows = range(len(batch.returns)) if sampled else []
    return Updater(policy, settings).accumulate(
        batch, rows, advantages, None, distil_targets, range(len(distil_targets.weights)) if distil_targets else ()
    )


def test_the_gradient_of_distil_targets_is_the_slope_of_the_loops_loss(paths, model):
    """Along the gradient itself, where a wrong sign, weight, mask or divisor would show."""
    policy, distil_targets = stirred(model, SETTINGS), distil_targets_of(paths)
    done = accumulated(policy, SETTINGS, paths, sampled=False, taught=True)
    assert sum(done.losses) == pytest.approx(looped_loss(policy, distil_targets), rel=1e-5) and done.distil == sum(done.losses)
    weights = policy.parameters()
    direction = [torch.zeros_like(weight) if weight.grad is None else weight.grad.clone() for weight in weights]
    length = float(torch.stack([part.norm() for part in direction]).norm())
    ends, step = [], 2e-4
    for side in (step, -2 * step):
        with torch.no_grad():
            for weight, part in zip(weights, direction, strict=True):
                weight.add_(part, alpha=side / length)
        ends.append(looped_loss(policy, distil_targets))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(length, rel=0.02)


def test_the_loss_of_distil_targets_does_not_depend_on_the_micro_batches(paths, model):
    found = []
    for cut in ({"token_budget": 300}, {"token_budget": 8192}):
        settings = SETTINGS.model_copy(update=cut)
        policy = stirred(model, settings)
        done = accumulated(policy, settings, paths, sampled=True, taught=True)
        found.append((len(done.losses), sum(done.losses), done.distil, gradient_of(policy)))
    assert found[0][0] > found[1][0], "nothing was cut, so nothing was tested"
    for _, loss, distil, gradient in found[1:]:
        assert (loss, distil) == (pytest.approx(found[0][1], abs=1e-5), pytest.approx(found[0][2], rel=1e-5))
        torch.testing.assert_close(gradient, found[0][3], rtol=1e-3, atol=1e-6)


def test_a_mixed_step_adds_the_distil_targets_and_leaves_the_rollouts_part_bitwise(paths, model):
    parts = {}
    for sampled, taught in ((True, False), (False, True), (True, True)):
        policy = stirred(model, SETTINGS)
        done = accumulated(policy, SETTINGS, paths, sampled=sampled, taught=taught)
        parts[sampled, taught] = done.losses, gradient_of(policy)
    alone, learned, mixed = parts[True, False], parts[False, True], parts[True, True]
    assert mixed[0] == [*alone[0], *learned[0]] and alone[0] and learned[0]
    torch.testing.assert_close(mixed[1], alone[1] + learned[1], rtol=1e-4, atol=1e-7)


def test_a_step_on_distil_targets_makes_the_teacher_s_answers_likelier(paths, model):
    settings = SETTINGS.model_copy(update={"learning_rate": 1e-2})
    policy, distil_targets = Policy(model, settings), distil_targets_of(paths, count=99)
    before = looped_loss(policy, distil_targets)
    trainer = Trainer(paths, policy, settings, StorageSettings())
    metrics = [whole_step(trainer, step, 0, replace(QUERY, count=99, max_uses=9)).metrics for step in (1, 2, 3)]
    assert looped_loss(policy, distil_targets) < before - 0.01
    assert metrics[0]["train/distil_loss"] == pytest.approx(before, rel=1e-4)
    assert (
        metrics[0]["train/distil_targets"] == distil_targets.batch.advantage_groups.max() + 1
        and metrics[0]["train/decisions"] == 0
    )
    entropy = -sum(weight * math.log(weight) for weight in distil_targets.weights.tolist())
    tokens = 0.0
    for row, weight in enumerate(distil_targets.weights.tolist()):
        places = range(distil_targets.batch.completion_offsets[row], distil_targets.batch.completion_offsets[row + 1])
        tokens += weight * sum(
            int(distil_targets.batch.legal_offsets[at + 1] - distil_targets.batch.legal_offsets[at]) > 1 for at in places
        )
    assert metrics[0]["train/teacher_entropy"] == pytest.approx(entropy / tokens, rel=1e-5)


def killed_before_the_forward(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_ledger_names_the_distil_targets_before_the_forward_and_a_kill_does_not_use_them_twice(
    paths, model, monkeypatch, tmp_path
):
    undisturbed = RunPaths(shutil.copytree(paths.root, tmp_path / "undisturbed"))
    for step in (1, 2):
        whole_step(trainer_of(undisturbed, model), step, 1, QUERY)
    with monkeypatch.context() as broken:
        broken.setattr(Updater, "updates", killed_before_the_forward)
        with pytest.raises(KeyboardInterrupt):
            whole_step(trainer_of(paths, model), 1, 1, QUERY)
    ledger = read_ledger(paths, 1)
    assert ledger is not None and len(recorded_distil_targets(ledger)) == 4 and ledger.num_rows
    whole_step(trainer_of(paths, model), 1, 1, None)  # repeated on what its ledger names, whatever is asked for
    whole_step(trainer_of(paths, model), 2, 1, QUERY)
    assert [read_adapter(paths, step) for step in (1, 2)] == [read_adapter(undisturbed, step) for step in (1, 2)]
    assert distil_target_uses(paths) == distil_target_uses(undisturbed)
    assert sum(distil_target_uses(paths).values()) == 8
    assert trainer_of(paths, model).distil_targets_left(QUERY) == 2 * taught_run.count(paths) - 8


def trainer_of(paths: RunPaths, model: Path) -> Trainer:
    return Trainer(paths, Policy(model, SETTINGS), SETTINGS, StorageSettings(max_policy_lag=9))


def test_a_step_on_distil_targets_is_replayed_bitwise(paths, model):
    trainer = trainer_of(paths, model)
    for step in (1, 2):
        whole_step(trainer, step, 1, QUERY)
    shutil.rmtree(paths.checkpoint(1))
    found = replay_step(paths, 2, model, SETTINGS, StorageSettings(max_policy_lag=9))
    assert found.difference is None and found.replayed == read_update_log(paths, 2)
    assert found.replayed is not None and found.replayed.updates


def test_a_recorded_distil_target_that_was_damaged_stops_the_step_with_a_sentence(paths, model, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(Updater, "updates", killed_before_the_forward)
        with pytest.raises(KeyboardInterrupt):
            whole_step(trainer_of(paths, model), 1, 0, QUERY)
    shutil.rmtree(paths.distil_targets)
    with pytest.raises(DataError, match=r"step 1 cannot be repeated on the rows of its ledger.*missing"):
        whole_step(trainer_of(paths, model), 1, 0)


def test_a_faulty_proposal_keeps_its_whole_distil_target_out(paths, model):
    distil_targets, chosen = distil_targets_of(paths), DistilStore(paths, 0).choose(replace(QUERY, count=3))
    ids = distil_targets.batch.input_ids.copy()
    ids[distil_targets.batch.input_offsets[1]] = 10**6
    faulty = replace(distil_targets, batch=replace(distil_targets.batch, input_ids=ids))
    kept, faults = trainer_of(paths, model)._without_faulty_distil_targets(chosen, faulty)
    assert kept is not None and faults == 1
    assert set(kept.batch.decision_ids.tolist()) == {distil_target.distil_target_id for distil_target in chosen[1:]}
    assert kept.weights.tolist() == distil_targets.weights[distil_targets.batch.advantage_groups > 0].tolist()


def test_updates_of_a_step_share_its_distil_targets(paths, model):
    settings = SETTINGS.model_copy(update={"updates_per_step": 2})
    batch, distil_targets, seen = rows_of(paths), distil_targets_of(paths), []
    updater = Updater(Policy(model, settings), settings)
    gradient = updater.gradient
    updater.gradient = lambda objective, rows, taught: seen.append(list(taught)) or gradient(objective, rows, taught)  # type: ignore[method-assign]
    assert len(list(updater.updates(batch, distil_targets))) == 2
    assert sorted(seen[0] + seen[1]) == list(range(len(distil_targets.weights))) and all(seen)
