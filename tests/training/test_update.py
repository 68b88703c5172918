"""What an update and a step of a real run do, and what moves from step to step, across a resumption."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from entente.training.advantages import leave_one_out
from entente.training.micro_batches import plan
from entente.training.policy import Policy
from entente.training.replay import replay_step
from entente.training.settings import TrainingSettings
from entente.training.trainer import Trainer
from entente.training.update import Updater, share_rows
from storage.adapters import read_adapter
from storage.gather import Batch
from storage.index import open_index
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.update_log import read_update_log
from tests.training import batches
from tests.training.test_packed_forward import policy_of
from tests.training.whole_step import whole_step

SETTINGS = TrainingSettings(learning_rate=1e-2, lora_rank=4, lora_alpha=8, device="cpu")
MOVING = SETTINGS.model_copy(
    update={
        "updates_per_step": 2,
        "advantage_scale": "batch",
        "importance_cap": 2.0,
        "kl_weight": 0.1,
        "entropy_weight": 0.01,
        "rate_schedule": "linear",
        "warm_up_steps": 1,
        "decay_steps": 4,
    }
)
"""Everything on that a step hands to the next one."""


def batch_of(paths: RunPaths) -> Batch:
    index = open_index(paths)
    rows, _ = index.select_batch(1, policy_version=0, start_groups=2)
    return index.gather(rows)


def trained(paths: RunPaths, model: Path, settings: TrainingSettings, steps: range) -> Trainer:
    trainer = Trainer(paths, Policy(model, settings), settings, StorageSettings(max_policy_lag=9))
    assert trainer.step_done == steps[0] - 1
    for step in steps:
        whole_step(trainer, step, 1)
    return trainer


def test_what_moves_from_step_to_step_is_resumed_bitwise(played, model, tmp_path):
    """Three steps in one go, and with another process' worth of state before each."""
    hashes, ends = [], []
    for name, cuts in {"whole": [range(1, 4)], "cut": [range(1, 2), range(2, 3), range(3, 4)]}.items():
        paths = RunPaths(shutil.copytree(played.root, tmp_path / name))
        for steps in cuts:
            torch.manual_seed(len(ends))
            last = trained(paths, model, MOVING, steps)._updater
        ends.append(last.optimiser.param_groups[0]["lr"])
        hashes.append([read_adapter(paths, step).adapter_hash for step in (1, 2, 3)])
    assert hashes[0] == hashes[1] and ends[0] == ends[1]
    assert 0 < ends[0] < 1e-2, "nothing moved, so nothing was tested"


def test_a_step_with_moving_state_is_replayed_bitwise(paths, model):
    trained(paths, model, MOVING, range(1, 4))
    found = replay_step(paths, 3, model, MOVING, StorageSettings(max_policy_lag=9))
    assert found.difference is None and found.replayed == read_update_log(paths, 3)


def test_a_gradient_that_is_too_long_is_scaled_down_and_told_as_it_was(paths, model, monkeypatch):
    monkeypatch.setattr("entente.training.update.MAX_GRADIENT_NORM", 1e-3)
    updater, batch = Updater(Policy(model, SETTINGS), SETTINGS), batch_of(paths)
    advantages = leave_one_out(batch.returns, batch.advantage_groups).astype(np.float32)
    accumulated = updater.accumulate(batch, range(len(batch.returns)), advantages)
    before = [weight.grad.clone() for weight in updater.policy.parameters() if weight.grad is not None]
    length = float(torch.cat([part.flatten() for part in before]).norm())
    assert updater.apply(accumulated).grad_norm == pytest.approx(length, rel=1e-5) and length > 1e-2
    after = [weight.grad for weight in updater.policy.parameters() if weight.grad is not None]
    for clipped, whole in zip(after, before, strict=True):
        torch.testing.assert_close(clipped, whole * (1e-3 / length), rtol=1e-3, atol=1e-12)


def test_the_base_is_asked_only_while_its_weight_is_above_zero(paths, model, monkeypatch):
    asked = []
    honest = Policy.reference
    monkeypatch.setattr(Policy, "reference", lambda self, micro: asked.append(1) or honest(self, micro))
    trained(paths, model, SETTINGS, range(1, 2))
    assert not asked
    weighed = SETTINGS.model_copy(update={"kl_weight": 0.1})
    shutil.rmtree(paths.checkpoints)
    shutil.rmtree(paths.ledger)
    shutil.rmtree(paths.adapters)
    figures = whole_step(Trainer(paths, Policy(model, weighed), weighed, StorageSettings()), 1, 1).metrics
    assert asked and figures["train/kl_p99"] >= figures["train/kl_p50"]


def test_the_reference_is_the_base_and_not_the_sampler(paths, model):
    """With the adapter off the policy is the base, whose rows these are: the divergence is that from version 0."""
    settings = SETTINGS.model_copy(update={"kl_weight": 0.1})
    policy, batch = policy_of(model, settings), batch_of(paths)
    micro = plan(batch, range(len(batch.returns)), 4096)[0]
    base = policy.reference(micro)
    torch.testing.assert_close(base.legal, Policy(model, settings).reference(micro).legal, rtol=0, atol=1e-6)
    assert not base.legal.requires_grad
    divergence = policy.masked_logprobs(micro, base)["kl"]
    assert divergence.requires_grad and float(divergence.detach().max()) > 1e-3


def test_with_truncated_weights_later_updates_are_held_to_where_the_step_began(paths, model):
    """The first update's ratio is 1 whatever the lag; the second one's is not, and only there a guard can act."""
    settings = SETTINGS.model_copy(update={"importance_cap": 2.0, "updates_per_step": 2, "clip_low": 1e-6, "clip_high": 1e-6})
    policy = policy_of(model, settings)
    updates = list(Updater(policy, settings).updates(batch_of(paths)))
    clipped = [bool((update.tokens["clipped_low"] | update.tokens["clipped_high"]).any()) for update in updates]
    assert clipped == [False, True]
    assert all(float(np.abs(update.tokens["log_ratio"]).max()) > 0.01 for update in updates), "the gauge is against the sampler"


FORKS, GROUPS = 2, 24


def dealt(shares: int, count: int = GROUPS) -> list[list[int]]:
    """The advantage groups of each update, of `count`."""
    rows = [([1, 2], [3, 4])] * (FORKS * count)
    batch = batches.batch_of(rows, groups=[row // FORKS for row in range(FORKS * count)], widest=5)
    return [[int(batch.advantage_groups[row]) for row in share] for share in share_rows(batch, shares)]


def test_one_update_has_every_row_in_the_batch_s_order():
    assert dealt(1) == [sorted([*range(GROUPS)] * FORKS)]


@pytest.mark.parametrize("shares", [2, 5])
def test_updates_have_whole_groups_and_about_equally_many(shares: int):
    found = dealt(shares)
    assert sorted(group for share in found for group in share) == sorted([*range(GROUPS)] * FORKS)
    assert all(share.count(group) == FORKS for share in found for group in share)
    assert {len(set(share)) for share in found} <= {GROUPS // shares, GROUPS // shares + 1}


@pytest.mark.parametrize("phases", [2, 3, 4, 6])
def test_every_update_has_groups_of_all_phases(phases: int):
    """Groups are sorted by start group and phase."""
    for share in dealt(2, 20 * phases):
        of_phase = np.bincount(np.array(share[::FORKS]) % phases, minlength=phases)
        assert of_phase.min() >= 5 and of_phase.max() <= 15, "about half of 20"


def test_rows_without_a_choice_make_no_update():
    rows = [([1, 2], [3, 4])] * 3
    assert share_rows(batches.batch_of(rows, groups=[0, 1, 2], widest=1), 3) == []
    assert sorted(share_rows(batches.batch_of(rows, groups=[0, 1, 2], widest=5), 3)) == [[0], [1], [2]]
