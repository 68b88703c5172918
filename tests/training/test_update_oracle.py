"""What the trainer makes of a real run's rows, against a plain forward of one row after another and float64 loops over it; and
what moves from step to step, across a resumption."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from storage.adapters import read_adapter
from storage.gather import Batch
from storage.index import SelectionQuery, open_index
from storage.outcome import outcome_path, read_outcome
from storage.runs import RunPaths
from storage.settings import StorageSettings
from tests.training.loss_oracle import ORACLES, Token, divergence, entropy, legal_mass, masked
from training.advantages import leave_one_out
from training.layout import Cut
from training.mass_probe import probed
from training.policy import Policy
from training.replay import replay_step
from training.settings import TrainingSettings
from training.token_budget import TokenBudget
from training.trainer import Trainer
from training.update import Updater

SETTINGS = TrainingSettings(learning_rate=1e-2, lora_rank=4, lora_alpha=8, device="cpu")
MOVING = SETTINGS.model_copy(
    update={
        "updates_per_step": 2,
        "advantage_scale": "batch",
        "importance_cap": 2.0,
        "kl_weight": 0.1,
        "entropy_weight": 0.01,
        "entropy_target": 5.0,
    }
)
"""Everything on that a step hands to the next one."""


@pytest.fixture(scope="module")
def played(exact_run, tmp_path_factory) -> RunPaths:
    """One run with rows; tests copy it."""
    return exact_run(tmp_path_factory.mktemp("played") / "run", groups=4, forks=4)


@pytest.fixture
def paths(played: RunPaths, tmp_path: Path) -> RunPaths:
    return RunPaths(shutil.copytree(played.root, tmp_path / "copy"))


def batch_of(paths: RunPaths) -> Batch:
    index = open_index(paths)
    query = SelectionQuery(step=1, policy_version=0, max_policy_lag=2, start_groups=2, seed=0)
    return index.gather(index.select_batch(query).rows)


def drawn_by_another(batch: Batch) -> Batch:
    """The batch as if every third row had been drawn with far higher odds than it was, and every third with far lower ones."""
    gap = np.repeat(np.arange(len(batch.returns)) % 3 - 1, np.diff(batch.completion_offsets))
    return replace(batch, behaviour_logprobs=batch.behaviour_logprobs + 0.5 * gap.astype(np.float32))


def stirred(model: Path, settings: TrainingSettings) -> Policy:
    """A policy that left the sampler: ratios are no longer 1, and guards act."""
    policy = Policy(model, settings)
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=dice))
    return policy


ALL_TERMS = {"kl_weight": 0.3, "entropy_weight": 0.1, "legal_mass_weight": 0.2}


class Loops:
    """The loss of a batch, one row after another through the model as transformers has it, then plain Python."""

    def __init__(self, batch: Batch, settings: TrainingSettings) -> None:
        self._batch, self._settings = batch, settings
        self._weighed: list[float] = []  # log-probabilities of which weights without a gradient are made: those of the first loss
        self._advantages = leave_one_out(batch.returns, batch.advantage_groups)

    def rows(self, policy: Policy) -> list[tuple[int, int, list[int], list[float]]]:
        """Row, completion index, legal set and all logits of every branching token."""
        found, batch = [], self._batch
        for row in range(len(batch.returns)):
            ids = batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]]
            with torch.no_grad():
                logits = policy.model(input_ids=torch.tensor(ids[None].astype(np.int64))).logits[0].double()
            for place in range(batch.completion_offsets[row], batch.completion_offsets[row + 1]):
                legal = batch.legal_ids[batch.legal_offsets[place] : batch.legal_offsets[place + 1]].tolist()
                if len(legal) > 1:
                    position = int(batch.prompt_lens[row] + place - batch.completion_offsets[row])
                    found.append((row, place, legal, logits[position - 1].tolist()))
        return found

    def tokens(self, policy: Policy) -> tuple[list[Token], list[dict[int, float]], list[float]]:
        """Drawn tokens, policies at their positions, and the legal masses of the probed ones."""
        batch, tokens, policies, masses = self._batch, [], [], []
        for row, place, legal, logits in self.rows(policy):
            over = masked(logits, legal)
            start = batch.input_offsets[row] + batch.prompt_lens[row] - batch.completion_offsets[row]
            drawn = int(batch.input_ids[start + place])
            tokens.append(Token(over[drawn], float(batch.behaviour_logprobs[place]), float(self._advantages[row]), row))
            policies.append(over)
            if probed(np.array([place]))[0]:
                masses.append(legal_mass(logits, legal))
        return tokens, policies, masses

    def loss(self, policy: Policy) -> float:
        settings = self._settings
        tokens, policies, masses = self.tokens(policy)
        self._weighed = self._weighed or [token.now for token in tokens]
        tokens = [replace(token, weighed=then) for token, then in zip(tokens, self._weighed, strict=True)]
        loss = sum(part.loss for part in ORACLES[settings.loss](tokens))
        if settings.kl_weight:
            with policy.model.disable_adapter():
                references = self.tokens(policy)[1]
            gaps = [divergence(p, r) for p, r in zip(policies, references, strict=True)]
            loss += settings.kl_weight * sum(gaps) / len(gaps)
        loss -= settings.entropy_weight * sum(map(entropy, policies)) / len(policies)
        if settings.legal_mass_weight:
            loss -= settings.legal_mass_weight * sum(float(np.log(mass)) for mass in masses) / len(masses)
        return loss


def test_an_entropy_weight_that_follows_a_target_pulls_like_a_fixed_one(paths, model):
    batch, slopes = batch_of(paths), []
    advantages = leave_one_out(batch.returns, batch.advantage_groups).astype(np.float32)
    for chosen in ({"entropy_weight": 0.1}, {"entropy_target": 5.0}):
        settings = SETTINGS.model_copy(update=chosen)
        updater = Updater(stirred(model, settings), settings)
        updater.entropy = 0.1  # only the target reads it
        updater.accumulate(batch, range(len(batch.returns)), advantages)
        slopes.append(torch.cat([part.grad.ravel() for part in updater.policy.parameters() if part.grad is not None]))
    assert torch.equal(*slopes)


@pytest.mark.parametrize(
    ("layout", "chosen"),
    [
        pytest.param("packed", {"loss": "cispo"}, id="cispo"),
        pytest.param("packed", {"loss": "clipped"}, id="clipped"),
        pytest.param("packed", {"loss": "dppo"}, id="dppo"),
        pytest.param("packed", {"loss": "gspo"}, id="gspo"),
        pytest.param("packed", {"loss": "sequence_mean"}, id="sequence mean"),
        pytest.param("packed", ALL_TERMS, id="all terms"),
        # A layout changes what a loss is made of, and no loss: one shows it.
        pytest.param("padded", ALL_TERMS, id="all terms, padded"),
    ],
)
def test_the_gradient_of_an_update_is_the_slope_of_the_loops_loss(paths, model, layout: str, chosen: dict[str, Any]):
    """Along the gradient itself, where a wrong sign, mask, side or constant would show."""
    settings = SETTINGS.model_copy(update=chosen | {"layout": layout})
    policy, batch = stirred(model, settings), drawn_by_another(batch_of(paths))
    advantages = leave_one_out(batch.returns, batch.advantage_groups).astype(np.float32)
    done = Updater(policy, settings).accumulate(batch, range(len(batch.returns)), advantages)
    loops = Loops(batch, settings)
    assert sum(done.losses) == pytest.approx(loops.loss(policy), abs=2e-6)
    if settings.loss != "cispo":  # it has none
        assert (done.gauges.clipped_low | done.gauges.clipped_high).any(), "no guard acted, so none was tested"
    weights = policy.parameters()
    direction = [torch.zeros_like(weight) if weight.grad is None else weight.grad.clone() for weight in weights]
    length = float(torch.stack([part.norm() for part in direction]).norm())
    ends, step = [], 2e-4
    for side in (step, -2 * step):
        with torch.no_grad():
            for weight, part in zip(weights, direction, strict=True):
                weight.add_(part, alpha=side / length)
        ends.append(loops.loss(policy))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(length, rel=0.02)


def trained(paths: RunPaths, model: Path, settings: TrainingSettings, steps: range) -> Trainer:
    trainer = Trainer(paths, Policy(model, settings), settings, StorageSettings(max_policy_lag=9))
    assert trainer.step_done == steps[0] - 1
    for step in steps:
        trainer.step(step, 1)
    return trainer


def test_what_moves_from_step_to_step_is_resumed_bitwise(played, model, tmp_path):
    """Three steps in one go, and with another process' worth of state before each."""
    hashes, ends = [], []
    for name, cuts in {"whole": [range(1, 4)], "cut": [range(1, 2), range(2, 3), range(3, 4)]}.items():
        paths = RunPaths(shutil.copytree(played.root, tmp_path / name))
        trainers = [trained(paths, model, MOVING, steps) for steps in cuts]
        last = trainers[-1]._updater
        ends.append(last.entropy)
        hashes.append([read_adapter(paths, step).adapter_hash for step in (1, 2, 3)])
    assert hashes[0] == hashes[1] and ends[0] == ends[1]
    assert ends[0] is not None and ends[0] > 0.05, "nothing moved, so nothing was tested"


def test_a_state_that_is_lost_gives_another_step(played, model, tmp_path):
    """The test above has teeth: with the state left out of it, the same checkpoint goes on elsewhere."""
    hashes = []
    for forgets in (False, True):
        paths = RunPaths(shutil.copytree(played.root, tmp_path / str(forgets)))
        trained(paths, model, MOVING, range(1, 3))
        trainer = Trainer(paths, Policy(model, MOVING), MOVING, StorageSettings(max_policy_lag=9))
        if forgets:
            trainer._updater.entropy = Updater(trainer._updater.policy, MOVING).entropy
        hashes.append(trainer.step(3, 1).published.adapter_hash)
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("kept", [True, False], ids=["from a checkpoint", "from the first weights"])
def test_a_step_with_moving_state_is_replayed_bitwise(paths, model, kept: bool):
    trained(paths, model, MOVING, range(1, 4))
    if not kept:
        shutil.rmtree(paths.checkpoints)
    found = replay_step(paths, 3, model, MOVING, StorageSettings(max_policy_lag=9))
    assert found.difference is None and found.replayed == read_outcome(paths, 3)


def test_a_step_that_began_from_more_than_weights_is_not_rehearsed_from_weights_alone(paths, model):
    """An earlier step that differs leaves the one asked for unreached; from its adapter it would seem to differ, too."""
    trained(paths, model, MOVING, range(1, 4))
    for file in paths.checkpoints.glob("*/manifest.json"):
        file.unlink()
    stored = json.loads(outcome_path(paths, 1).read_bytes())
    stored["updates"][0]["micro_batches"][0] += 1.0
    outcome_path(paths, 1).write_text(json.dumps(stored))
    found = replay_step(paths, 3, model, MOVING, StorageSettings(max_policy_lag=9))
    assert found.difference is not None and found.difference.step == 1 and found.replayed is None and found.from_adapter is None


def test_a_gradient_that_is_too_long_is_scaled_down_and_told_as_it_was(paths, model):
    settings = SETTINGS.model_copy(update={"max_gradient_norm": 1e-3})
    updater, batch = Updater(Policy(model, settings), settings), batch_of(paths)
    advantages = leave_one_out(batch.returns, batch.advantage_groups).astype(np.float32)
    accumulated = updater.accumulate(batch, range(len(batch.returns)), advantages)
    before = [weight.grad.clone() for weight in updater.policy.parameters() if weight.grad is not None]
    length = float(torch.cat([part.flatten() for part in before]).norm())
    assert updater.apply(accumulated).outcome.gradient_norm == pytest.approx(length, rel=1e-5) and length > 1e-2
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
    figures = Trainer(paths, Policy(model, weighed), weighed, StorageSettings()).step(1, 1).metrics
    assert asked and figures["train/kl_weight"] == 0.1 and figures["train/kl_p99"] >= figures["train/kl_p50"]


def test_the_reference_is_the_base_and_not_the_sampler(paths, model):
    """With the adapter off the policy is the base, whose rows these are: the divergence is that from version 0."""
    settings = SETTINGS.model_copy(update={"kl_weight": 0.1})
    policy, batch = stirred(model, settings), batch_of(paths)
    updater = Updater(policy, settings)
    micro = updater.cut(batch, range(len(batch.returns))).micro_batches[0]
    base = policy.reference(micro)
    torch.testing.assert_close(base.legal, Policy(model, settings).reference(micro).legal, rtol=0, atol=1e-6)
    assert not base.legal.requires_grad
    divergence = policy.masked_logprobs(micro, base).kl
    assert divergence is not None and divergence.requires_grad and float(divergence.detach().max()) > 1e-3


def test_the_token_budget_is_measured_on_the_largest_micro_batch(paths, model, monkeypatch):
    settings, batch, measured = SETTINGS.model_copy(update={"token_budget": 300}), batch_of(paths), []
    cut = Updater.cut

    def smallest_first(self: Updater, batch: Batch, rows: list[int]) -> Cut:
        found = cut(self, batch, rows)
        return replace(found, micro_batches=tuple(sorted(found.micro_batches, key=lambda micro: micro.tokens)))

    monkeypatch.setattr(Updater, "cut", smallest_first)
    monkeypatch.setattr(TokenBudget, "calibrate", lambda self, warm: measured.append(warm(self.tokens)))
    updater = Updater(Policy(model, settings), settings)
    rows = list(range(len(batch.returns)))
    sizes = [micro.tokens for micro in updater.cut(batch, rows).micro_batches]
    updater.accumulate(batch, rows, batch.returns.astype(np.float32))
    assert measured == [max(sizes)] and sizes[0] < max(sizes)


def test_with_truncated_weights_later_updates_are_held_to_where_the_step_began(paths, model):
    """The first update's ratio is 1 whatever the lag; the second one's is not, and only there a guard can act."""
    settings = SETTINGS.model_copy(update={"importance_cap": 2.0, "updates_per_step": 2, "clip_low": 1e-6, "clip_high": 1e-6})
    policy = stirred(model, settings)
    updates = list(Updater(policy, settings).updates(batch_of(paths)))
    clipped = [bool((update.computed.gauges.clipped_low | update.computed.gauges.clipped_high).any()) for update in updates]
    assert clipped == [False, True]
    assert all(float(np.abs(update.computed.gauges.log_ratio).max()) > 0.01 for update in updates), (
        "the gauge is against the sampler"
    )


def test_a_step_s_figures_have_the_lag_zero_gap_and_the_controller_s_weight(paths, model):
    trainer = Trainer(paths, Policy(model, MOVING), MOVING, StorageSettings())
    metrics = trainer.step(1, 1).metrics
    assert 0 <= metrics["train/log_ratio_lag0_mean"] < 1e-4 and metrics["train/mismatch_alarm"] == 0
    assert metrics["train/policy_lag_0_share"] == 1 and metrics["memory/trainer_peak_mib"] > 10
    assert metrics["train/unique_tokens"] <= metrics["train/tokens"] and metrics["train/branching_tokens_per_s"] > 0
